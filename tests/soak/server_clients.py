"""Clients of a server: good ones, which check each answer, and bad ones, which no server likes."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SECONDS = 120.0  # for an answer, on a busy machine
MOST_ROWS = 5
PATH = "/v1/models/digits:predict"
ROWS = np.random.default_rng(5).normal(size=(41, 8, 8, 1)).astype(np.float32)
_PAUSE = 0.02  # s, after a refusal


@dataclasses.dataclass
class Seen:
    """The answers that the clients of a server have got.

    Attributes:
        answers: dict of a version's number to how many answers came from it.
        refused: int, requests that were refused because there was too much to do.
        wrong: list of str, answers that are not right.
        lost: list of (float, str): when a request was sent that got no answer, and why.
        bad: dict of a bad client's way to how many times it was tried.
    """

    answers: dict[int, int] = dataclasses.field(default_factory=dict)
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    lost: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    bad: dict[str, int] = dataclasses.field(default_factory=dict)


class Clients:
    """Context manager: clients that ask until it ends.

    Args:
        port: int, of the server.
        good, bad: int, how many clients of each kind.
        seed: int.
        first: array, the predictions of version 1 for `ROWS`.

    Attributes:
        seen: `Seen`.
        expected: dict of a version's number to the predictions for `ROWS`.
        is_ending: bool, whether the server may close connections.
    """

    def __init__(self, port: int, good: int, bad: int, seed: int, first: Any) -> None:
        self._port = port
        self.seen = Seen()
        self.expected: dict[int, Any] = {1: first}
        self.is_ending = False
        self._over = threading.Event()
        self._lock = threading.Lock()  # of `seen`
        self._threads = [
            threading.Thread(target=run, args=(random.Random(seed + number),), daemon=True)
            for number, run in enumerate([self._ask] * good + [self._disturb] * bad)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def join(self) -> None:
        """Waits until all have left, as good ones do by themselves once the server has ended."""
        end = time.monotonic() + 2 * SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            assert not thread.is_alive(), "a client still waits for an answer"

    @property
    def count(self) -> int:
        """The answers that were right."""
        with self._lock:
            return sum(self.seen.answers.values())

    def _note(self, what: Callable[[Seen], None]) -> None:
        with self._lock:
            what(self.seen)

    # --------------------------------------------------------------------------- good clients
    def _ask(self, draw: random.Random) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._over.is_set():
            if connection is None:
                connection = self._connect()
                if connection is None:
                    return
            begin = draw.randrange(len(ROWS) - MOST_ROWS)
            end = begin + draw.randrange(1, MOST_ROWS + 1)
            sent = time.monotonic()
            try:
                is_open = self._ask_once(connection, begin, end)
            except (OSError, http.client.HTTPException) as error:
                lost = sent, f"{type(error).__name__}: {error}"
                self._note(lambda seen, lost=lost: seen.lost.append(lost))  # type: ignore[misc]
                is_open = False
            if not is_open:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection | None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            connection.connect()
        except OSError as error:
            if not self.is_ending:
                text = f"cannot connect: {error}"
                self._note(lambda seen: seen.wrong.append(text))
            return None
        return connection

    def _ask_once(self, connection: http.client.HTTPConnection, begin: int, end: int) -> bool:
        """Returns False if the server closes the connection."""
        body = json.dumps({"instances": ROWS[begin:end].tolist()}).encode()
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            self._note(lambda seen: setattr(seen, "refused", seen.refused + 1))
            time.sleep(_PAUSE)
        else:
            self._check(answer.status, text, begin, end)
        return not answer.will_close

    def _check(self, status: int, text: bytes, begin: int, end: int) -> None:
        version = self._version_of(text, begin, end) if status == 200 else None
        if version is None:
            wrong = f"rows {begin} to {end}: {status} {text[:300]!r}"
            self._note(lambda seen: seen.wrong.append(wrong))
            return
        found = version
        self._note(lambda seen: seen.answers.update({found: seen.answers.get(found, 0) + 1}))

    def _version_of(self, text: bytes, begin: int, end: int) -> int | None:
        """Returns the number of the version whose predictions these are; None for no version's."""
        found = np.asarray(json.loads(text)["predictions"])
        for number, expected in list(self.expected.items()):
            rows = expected[begin:end]
            if found.shape == rows.shape and np.allclose(found, rows, rtol=0, atol=1e-5):
                return number
        return None

    # ---------------------------------------------------------------------------- bad clients
    def _disturb(self, draw: random.Random) -> None:
        ways = (_half, _leaves, _garbage, _slow, _not_rows, _not_json, _long_head, _does_not_read)
        while not self._over.is_set() and not self.is_ending:
            way = draw.choice(ways)
            try:
                with socket.create_connection(("127.0.0.1", self._port), SECONDS) as sock:
                    status = way(sock, draw)
            except OSError as error:
                status = error
            said = "" if status in _ALLOWED[way] or self.is_ending else f"{way.__name__}: {status}"
            name = way.__name__

            def note(seen: Seen, name: str = name, said: str = said) -> None:
                seen.bad[name] = seen.bad.get(name, 0) + 1
                if said:
                    seen.wrong.append(said)

            self._note(note)
            time.sleep(_PAUSE)


def _request(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n"
    return head.encode() + body


def _good_request() -> bytes:
    return _request(json.dumps({"instances": ROWS[:2].tolist()}).encode())


def ask_raw(port: int) -> socket.socket:
    """Sends a request that is right; returns the connection."""
    sock = socket.create_connection(("127.0.0.1", port), SECONDS)
    sock.sendall(_good_request())
    return sock


def status_of(sock: socket.socket) -> int | None:
    """Returns the status of an answer; None if the server has closed the connection."""
    data = b""
    while b"\r\n" not in data:
        piece = sock.recv(1 << 16)
        if not piece:
            return None
        data += piece
    return int(data.split(b" ", 2)[1])


def _half(sock: socket.socket, draw: random.Random) -> Any:
    sock.sendall(_good_request()[: draw.randrange(10, 400)])


def _leaves(sock: socket.socket, draw: random.Random) -> Any:
    sock.sendall(_good_request())
    time.sleep(draw.choice((0.0, 0.001, 0.005)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets


def _garbage(sock: socket.socket, draw: random.Random) -> Any:
    sock.sendall(b"\xff" + draw.randbytes(draw.randrange(10, 2000)))
    return status_of(sock)


def _slow(sock: socket.socket, draw: random.Random) -> Any:
    data = _good_request()
    for begin in range(0, len(data), 200):
        sock.sendall(data[begin : begin + 200])
        time.sleep(0.005)
    return status_of(sock)


def _not_rows(sock: socket.socket, draw: random.Random) -> Any:
    sock.sendall(_request(b'{"instances": [[1, 2]]}'))
    return status_of(sock)


def _not_json(sock: socket.socket, draw: random.Random) -> Any:
    sock.sendall(_request(draw.randbytes(500)))
    return status_of(sock)


def _long_head(sock: socket.socket, draw: random.Random) -> Any:
    with contextlib.suppress(ConnectionError):  # the server need not read all of it
        sock.sendall(b"GET / HTTP/1.1\r\nname: " + b"a" * (1 << 17))
    return status_of(sock)


def _does_not_read(sock: socket.socket, draw: random.Random) -> Any:
    sock.sendall(_good_request() * 8)


# 429: there was too much to do, or the load refuses before it reads the body.
_ALLOWED: dict[Callable[[socket.socket, random.Random], Any], tuple[Any, ...]] = {
    _half: (None,),
    _leaves: (None,),
    _garbage: (400,),
    _slow: (200, 429),
    _not_rows: (400, 429),
    _not_json: (400, 429),
    # The first read may bring all of it; the headers are then late, not too long.
    _long_head: (431, 408),
    _does_not_read: (None,),
}
