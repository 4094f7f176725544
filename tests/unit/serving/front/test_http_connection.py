"""HTTP/1.1 as the front speaks it: limits, order, broken clients."""

import asyncio
import contextlib
import json

import pytest

pytest.importorskip("httptools")

from nanotf.serving.front import http_connection
from nanotf.serving.front.http_connection import HttpConnection
from nanotf.serving.interface import Response

MOST = 1000


class Desk:
    """Answers with what it got; requests for /wait later, when `release` is called."""

    most_bytes = MOST
    most_connections = 1000
    is_leaving = False

    def __init__(self):
        self.taken, self.held = [], []

    def take(self, incoming):
        self.taken.append(incoming)
        if incoming.path == "/wait":
            self.held.append(incoming)
        else:
            self.answer(incoming)

    def answer(self, incoming):
        said = {"method": incoming.method, "path": incoming.path, "body": len(incoming.body)}
        incoming.reply(Response(200, json.dumps(said).encode()))

    def broken(self, status, text):
        return Response(status, json.dumps({"error": text}).encode())


def talk(script):
    """Runs `script(desk, reader, writer, connections, clock)` with a server on a free port."""

    async def run():
        desk, connections, clock = Desk(), set(), [0.0]
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: HttpConnection(desk, connections, lambda: clock[0]), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            await asyncio.wait_for(script(desk, reader, writer, connections, clock), 30)
        finally:
            writer.close()
            server.close()

    asyncio.run(run())


async def answer_of(reader):
    """Reads one answer; returns its status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def post(path="/x", body=b"hello", *headers):
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_a_connection_carries_one_request_after_another():
    async def script(desk, reader, writer, connections, clock):
        for size in (0, 1, MOST):
            writer.write(post(body=bytes(size)))
            status, headers, body = await answer_of(reader)
            assert (status, json.loads(body)["body"]) == (200, size)
            assert headers["content-type"] == "application/json"
            assert "connection" not in headers

    talk(script)


def test_requests_that_come_at_once_are_answered_in_order():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait") + b"".join(post(f"/{n}") for n in range(40)))
        while not desk.held:
            await asyncio.sleep(0)
        assert len(desk.taken) == 1  # the others wait
        desk.answer(desk.held[0])
        paths = [json.loads((await answer_of(reader))[2])["path"] for _ in range(41)]
        assert paths == ["/wait", *(f"/{n}" for n in range(40))]

    talk(script)


def test_many_requests_that_the_desk_answers_at_once():
    """More than Python has room for calls within calls; the first one holds them up."""

    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait") + b"".join(post(f"/{n}", b"") for n in range(1500)))
        while not desk.held:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        desk.answer(desk.held[0])
        paths = [json.loads((await answer_of(reader))[2])["path"] for _ in range(1501)]
        assert paths == ["/wait", *(f"/{n}" for n in range(1500))]

    talk(script)


def test_bytes_of_earlier_requests_are_no_headers():
    async def script(desk, reader, writer, connections, clock):
        many = 2 * http_connection.MAX_HEADERS // len(post("/x", b"")) + 1
        writer.write(post("/x", b"") * many + b"POST /last HTTP/1.1\r\nho")
        for _ in range(many):
            assert (await answer_of(reader))[0] == 200
        writer.write(b"st: h\r\ncontent-length: 0\r\n\r\n")
        assert json.loads((await answer_of(reader))[2])["path"] == "/last"

    talk(script)


def test_a_closing_connection_whose_client_does_not_read_ends():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait", b"", "Connection: close"))
        while not desk.held:
            await asyncio.sleep(0)
        (connection,) = connections
        size = 1 << 20
        while True:  # some bytes more than the kernel takes
            connection._transport.write(bytes(size))
            if connection._transport.get_write_buffer_size():
                break
        connection._blocked_since = None  # as with few bytes left
        desk.answer(desk.held[0])
        clock[0] += http_connection.WRITE_SECONDS + 1
        assert connections
        connection.check_time(clock[0])
        while connections:
            await asyncio.sleep(0)

    talk(script)


def test_pieces_and_chunks_make_a_request():
    async def script(desk, reader, writer, connections, clock):
        for byte in post(body=b"abc"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert json.loads((await answer_of(reader))[2])["body"] == 3
        writer.write(b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\nHost: of a trailer\r\n\r\n")
        assert json.loads((await answer_of(reader))[2])["body"] == 5
        assert desk.taken[-1].headers["host"] == "h"

    talk(script)


def test_expect_continue():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/x", b"", "Expect: 100-continue").replace(b": 0", b": 4"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abcd")
        assert json.loads((await answer_of(reader))[2])["body"] == 4

    talk(script)


def test_a_client_of_http_1_0_expects_nothing():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/x", b"abcd", "Expect: 100-continue").replace(b"1.1", b"1.0"))
        assert (await answer_of(reader))[0] == 200

    talk(script)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
        (b"POST /x HTTP/1.1\r\nContent-Length: abc\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + bytes(1001), 413),
        (b"GET /x HTTP/1.1\r\n" + b"a: " + b"x" * 700_000, 431),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ends(sent, status):
    async def script(desk, reader, writer, connections, clock):
        writer.write(sent)
        found, headers, body = await answer_of(reader)
        assert (found, headers["connection"]) == (status, "close")
        assert json.loads(body)["error"]
        assert await reader.read() == b""
        assert not desk.taken or status == 400

    talk(script)


def test_nonsense_after_a_request_does_not_answer_that_one():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait") + b"nonsense\r\n\r\n")
        while not desk.held:
            await asyncio.sleep(0)
        desk.answer(desk.held[0])
        assert json.loads((await answer_of(reader))[2])["path"] == "/wait"
        assert await reader.read() == b""

    talk(script)


def test_a_client_that_has_left_gets_no_answer():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait"))
        while not desk.held:
            await asyncio.sleep(0)
        writer.close()
        while connections:
            await asyncio.sleep(0.01)
        assert desk.held[0].has_left
        desk.answer(desk.held[0])  # raises nothing

    talk(script)


@pytest.mark.parametrize(
    ("sent", "seconds", "status"),
    [
        (b"POST /x HT", http_connection.HEADER_SECONDS, 408),
        (b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\nab", http_connection.BODY_SECONDS, 408),
        (b"", http_connection.IDLE_SECONDS, None),
    ],
)
def test_slow_clients_are_dropped(sent, seconds, status):
    async def script(desk, reader, writer, connections, clock):
        writer.write(sent)
        await asyncio.sleep(0.05)
        (connection,) = connections
        connection.check_time(seconds - 0.1)
        assert connections
        connection.check_time(seconds)
        if status is not None:
            assert (await answer_of(reader))[0] == status
        assert await reader.read() == b""

    talk(script)


def test_a_request_that_is_being_answered_is_not_late():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait"))
        while not desk.held:
            await asyncio.sleep(0)
        (connection,) = connections
        connection.check_time(1e6)
        desk.answer(desk.held[0])
        assert (await answer_of(reader))[0] == 200

    talk(script)


def test_a_server_that_ends_closes_after_the_answer():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait"))
        while not desk.held:
            await asyncio.sleep(0)
        desk.is_leaving = True
        for connection in connections:
            connection.leave()
        desk.answer(desk.held[0])
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""

    talk(script)


def test_http_1_0_and_head():
    async def script(desk, reader, writer, connections, clock):
        writer.write(b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: " in head
        writer.write(b"GET /x HTTP/1.0\r\n\r\n")
        assert (await answer_of(reader))[1]["connection"] == "close"
        assert await reader.read() == b""

    talk(script)


def test_http_1_0_with_a_connection_that_stays():
    async def script(desk, reader, writer, connections, clock):
        for _ in range(2):
            writer.write(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            status, headers, _ = await answer_of(reader)
            assert (status, headers["connection"]) == (200, "keep-alive")

    talk(script)


@pytest.mark.parametrize("pieces", [1, 2, 200])
def test_a_wish_for_another_protocol_is_ignored(pieces):
    wish = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk")

    async def script(desk, reader, writer, connections, clock):
        sent = post("/a", b"hello", *wish) + post("/b", b"again")
        for begin in range(0, len(sent), -(-len(sent) // pieces)):
            writer.write(sent[begin : begin + -(-len(sent) // pieces)])
            await writer.drain()
            await asyncio.sleep(0)
        for path in ("/a", "/b"):
            status, headers, body = await answer_of(reader)
            assert (status, json.loads(body)) == (200, {"method": "POST", "path": path, "body": 5})
            assert "connection" not in headers
        assert desk.taken[0].body == b"hello" and "upgrade" not in desk.taken[0].headers

    talk(script)


def test_many_wishes_for_another_protocol_at_once():
    async def script(desk, reader, writer, connections, clock):
        writer.write(2000 * post("/a", b"hello", "Upgrade: h2c", "Connection: Upgrade"))
        for _ in range(2000):
            assert (await answer_of(reader))[0] == 200

    talk(script)


def test_a_wish_for_another_protocol_lifts_no_limit():
    async def script(desk, reader, writer, connections, clock):
        writer.write(
            b"POST /x HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % (MOST + 1) + bytes(MOST + 1)
        )
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert not desk.taken

    talk(script)


def test_a_tunnel_is_no_request_for_another_one():
    async def script(desk, reader, writer, connections, clock):
        writer.write(b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n")
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"]) == (200, "close")  # of the test's desk
        assert await reader.read() == b""

    talk(script)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://host/v1/models/m:predict", "/v1/models/m:predict"),
        ("HTTPS://user@host:8080/a/b?c=http://d/e", "/a/b?c=http://d/e"),
        ("http://host?c=d", "/?c=d"),
        ("http://host", "/"),
        ("/a?b=http://c/d", "/a?b=http://c/d"),
        ("*", "*"),
    ],
)
def test_a_target_may_be_a_whole_url(target, path):
    async def script(desk, reader, writer, connections, clock):
        method = "OPTIONS" if target == "*" else "POST"
        writer.write(f"{method} {target} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode())
        assert json.loads((await answer_of(reader))[2])["path"] == path

    talk(script)


def test_headers_that_come_twice_are_a_list():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/x", b"", "Accept: a", "ACCEPT: b"))
        await answer_of(reader)
        assert desk.taken[0].headers["accept"] == "a, b"

    talk(script)


def test_connections_are_limited():
    async def script(desk, reader, writer, connections, clock):
        desk.most_connections = 2
        address = writer.get_extra_info("peername")
        others = [await asyncio.open_connection(*address) for _ in range(3)]
        ended = 0
        for other, _ in others:
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                ended += await asyncio.wait_for(other.read(), 0.5) == b""
        while len(connections) > 2:
            await asyncio.sleep(0.01)
        writer.write(post())
        assert (await answer_of(reader))[0] == 200
        for _, other in others:
            other.close()

    talk(script)


def test_a_client_that_does_not_read_is_dropped():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait"))
        while not desk.held:
            await asyncio.sleep(0)
        (connection,) = connections
        connection.pause_writing()
        connection.check_time(http_connection.WRITE_SECONDS - 1)
        assert connections
        connection.check_time(http_connection.WRITE_SECONDS + 1)
        while connections:
            await asyncio.sleep(0.01)
        assert desk.held[0].has_left

    talk(script)


def test_headers_of_an_answer_stay_headers():
    async def script(desk, reader, writer, connections, clock):
        writer.write(post("/wait"))
        while not desk.held:
            await asyncio.sleep(0)
        strange = Response(200, b"ok", "text/\r\nplain", (("x\n", "a\r\n\r\nb \N{SNOWMAN}"),))
        desk.held[0].reply(strange)
        status, headers, body = await answer_of(reader)
        assert (status, body) == (200, b"ok")
        assert headers["content-type"] == "text/plain"
        assert headers["x"] == "ab ?"

    talk(script)


def test_random_bytes_end_no_server():
    import random

    rng = random.Random(7)

    async def script(desk, reader, writer, connections, clock):
        address = writer.get_extra_info("peername")
        for _ in range(100):
            _, other = await asyncio.open_connection(*address)
            data = bytearray(post(body=b"x" * rng.randrange(20)))
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            other.write(bytes(data))
            with contextlib.suppress(ConnectionError):
                await other.drain()
            other.close()
        writer.write(post())
        assert (await answer_of(reader))[0] == 200

    talk(script)
