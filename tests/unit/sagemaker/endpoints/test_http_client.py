"""The client of a server: connections that stay open, a server that is busy, broken answers."""

from __future__ import annotations

import contextlib
import email.utils
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nanotf.errors import EndpointError, InvalidArgumentError
from nanotf.estimator import Predictor
from nanotf.sagemaker.endpoints import http_client
from nanotf.sagemaker.endpoints.http_client import HttpClient, NotReached

Answer = tuple[int, bytes, dict[str, str]]


class _Server:
    """Answers as `answers` say, in their order; then with 200."""

    def __init__(self) -> None:
        self.answers: list[Answer | None] = []  # None closes the connection instead
        self.seen: list[tuple[Any, str, bytes]] = []  # the client's address, path, body
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.seen.append((self.client_address, self.path, body))
                answer = outer.answers.pop(0) if outer.answers else (200, body, {})
                if answer is None:
                    self.close_connection = True
                    return
                status, body, headers = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a client that waits no longer
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[_Server]:
    found = _Server()
    yield found
    found.close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(http_client.time, "sleep", found.append)
    return found


@pytest.fixture
def client(server: _Server) -> Iterator[HttpClient]:
    found = HttpClient(server.url)
    yield found
    found.close()


def _connections(server: _Server) -> int:
    return len({address for address, *_ in server.seen})


def test_a_connection_stays_open(server: _Server, client: HttpClient) -> None:
    assert [client.post("/a", b"x", {}).body for _ in range(3)] == [b"x"] * 3
    assert _connections(server) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(
    status: int, server: _Server, client: HttpClient, slept: list[float]
) -> None:
    date = email.utils.formatdate(time.time() + 1000, usegmt=True)
    server.answers = [(status, b"", {"Retry-After": "2"}), (status, b"", {"Retry-After": "0"})]
    assert client.post("/a", b"x", {}).body == b"x"
    assert slept == [2.0, 0.0]
    server.answers = [(status, b"full", {"Retry-After": date})]  # longer than all tries may take
    with pytest.raises(EndpointError, match=f"status {status} from .*: full") as caught:
        client.post("/a", b"x", {})
    assert caught.value.status == status
    assert len(slept) == 2


@pytest.mark.parametrize(
    "answer",
    [
        (503, b"no", {}),
        (500, b"no", {"Retry-After": "0"}),
        (429, b"no", {"Retry-After": "x"}),
        (429, b"no", {"Retry-After": "nan"}),
        (429, b"no", {"Retry-After": f"Mon, 01 Jan 2024 00:00:00 +{'9' * 14}"}),
    ],
)
def test_other_refusals_are_final(
    answer: Answer, server: _Server, client: HttpClient, slept: list[float]
) -> None:
    server.answers = [answer]
    with pytest.raises(EndpointError, match=f"status {answer[0]}"):
        client.post("/a", b"x", {})
    assert (len(server.seen), slept) == (1, [])


def test_an_idle_connection_that_the_server_has_closed(server: _Server, client: HttpClient) -> None:
    client.post("/a", b"1", {})
    server.answers = [None]
    assert client.post("/a", b"2", {}).body == b"2"
    assert _connections(server) == 2


def test_a_server_that_answers_nothing(server: _Server, client: HttpClient) -> None:
    """On a new connection the request may have been executed: it is not sent again."""
    server.answers = [None]
    with pytest.raises(EndpointError, match=r"must answer within 70 s. Received: RemoteDisconnec"):
        client.post("/a", b"1", {})
    assert len(server.seen) == 1


def test_a_slow_server(server: _Server) -> None:
    gate = threading.Event()
    slow: Callable[[], bytes] = lambda: b"x" * gate.wait(60)  # noqa: E731
    client = HttpClient(server.url, timeout=0.1)

    class Waiting(tuple):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter((200, slow(), {}))

    server.answers = [Waiting()]  # type: ignore[list-item]
    try:
        with pytest.raises(
            EndpointError, match=r"must answer within 0.1 s. Received: TimeoutError"
        ):
            client.post("/a", b"1", {})
    finally:
        gate.set()


def test_nothing_listens(server: _Server) -> None:
    server.close()
    with pytest.raises(NotReached):
        HttpClient(server.url).post("/a", b"", {})
    with pytest.raises(EndpointError, match="A server must listen at the address"):
        Predictor(server.url).predict(b"")
    server.http = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    server.thread.start()


def test_a_fork_has_its_own_connection(server: _Server, client: HttpClient) -> None:
    client.post("/a", b"1", {})
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write_end, client.post("/a", b"child", {}).body)
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:  # noqa: PTH123
        assert pipe.read() == b"child"
    os.wait()
    assert client.post("/a", b"2", {}).body == b"2"
    assert _connections(server) == 2


def test_addresses(server: _Server) -> None:
    for address in ("localhost:80", "ftp://a", "http://", "http://a:b"):
        with pytest.raises(InvalidArgumentError, match="must be http://host:port"):
            HttpClient(address)
    again = pickle.loads(pickle.dumps(HttpClient(server.url + "/prefix/")))
    assert again.post("/a", b"", {}).body == b""
    assert server.seen[0][1] == "/prefix/a"
    again.close()
