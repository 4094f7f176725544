"""The way in by gRPC: errors, deadlines, cancelled calls, limits, health."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

pytest.importorskip("grpc")

import grpc

from nanotf.errors import InvalidArgumentError
from nanotf.serving.front.grpc_listener import GrpcCall, GrpcListener, client_of
from nanotf.serving.front.status_names import status_name
from nanotf.serving.interface import Response
from nanotf.serving.remote.remote_interface import RemoteInterface

MOST = 5 << 20  # bytes; above the 4 MiB of a server that sets no limit


class _Interface(RemoteInterface):
    name = "test"
    services: ClassVar[dict[str, tuple[str, ...]]] = {"a.Service": ("Method",)}

    def route(self, *_: Any) -> None:
        raise AssertionError("the desk would call it")

    decode = encode = route  # type: ignore[assignment]


class _Desk:
    """Keeps calls, and answers each with what a test has set."""

    def __init__(self) -> None:
        self.calls: list[GrpcCall] = []
        self.answer: Callable[[GrpcCall], Response | None] = lambda call: Response(200, call.body)
        self.ready = True
        self.has_come = asyncio.Event()

    def take(self, incoming: Any) -> None:
        self.calls.append(incoming)
        self.has_come.set()
        answer = self.answer(incoming)
        if answer is not None:
            incoming.reply(answer)

    def is_ready(self) -> bool:
        return self.ready


def _run(test: Callable[[_Desk, Any], Awaitable[None]]) -> None:
    """Runs a test with a listener and a client's channel."""

    async def run() -> None:
        desk = _Desk()
        now = asyncio.get_running_loop().time
        listener = GrpcListener(desk, [_Interface()], "127.0.0.1", 0, MOST, now)
        await listener.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
                await asyncio.wait_for(test(desk, channel), 60)
        finally:
            await listener.stop(0)

    asyncio.run(run())


def _call(
    channel: Any, body: bytes = b"body", method: str = "/a.Service/Method", **more: Any
) -> Any:
    return channel.unary_unary(method)(body, **more)


async def _error(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await call
    return found.value


def test_a_call_is_a_request_for_the_desk() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        assert await _call(channel, metadata=(("some-key", "value"),)) == b"body"
        (call,) = desk.calls
        assert (call.method, call.path, call.body) == ("POST", "/a.Service/Method", b"body")
        assert call.headers["some-key"] == "value"
        assert call.client == "127.0.0.1"
        assert (call.entrypoint, call.patience, call.has_left) == ("GRPC", None, False)

    _run(test)


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fe80::1%25eth0]:5000", "fe80::1%eth0"),
        ("unix:/tmp/a", "unix:/tmp/a"),
        ("", ""),
    ],
)
def test_the_address_of_a_client_is_that_of_http(peer: str, client: str) -> None:
    assert client_of(peer) == client


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"),
        (404, "NOT_FOUND"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (501, "UNIMPLEMENTED"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (418, "UNKNOWN"),
    ],
)
def test_errors_have_codes(status: int, code: str) -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        headers = (("retry-after", "7"),)
        desk.answer = lambda call: Response(status, "é".encode(), "", headers)
        error = await _error(_call(channel))
        assert (error.code().name, error.details()) == (code, "é")
        assert ("retry-after", "7") in tuple(error.trailing_metadata())

    _run(test)


def test_each_name_of_a_status_is_one_of_grpc() -> None:
    for status in range(100, 600):
        assert hasattr(grpc.StatusCode, status_name(status))


def test_a_long_text_reaches_the_client() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        desk.answer = lambda call: Response(400, "é".encode() * 100_000)
        error = await _error(_call(channel))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert set(error.details()) == {"é"}

    _run(test)


def test_methods_of_nobody() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        error = await _error(_call(channel, method="/a.Service/Other"))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert not desk.calls

    _run(test)


def test_the_limit_of_a_message() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        desk.answer = lambda call: Response(200, b"fits")
        assert await _call(channel, bytes(MOST)) == b"fits"
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            error = await _error(_call(channel, bytes(MOST + 1), compression=compression))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(desk.calls) == 1

    _run(test)


def test_a_client_that_cancels_has_left() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        desk.answer = lambda call: None
        call = _call(channel)
        task = asyncio.ensure_future(_wait(call))
        await desk.has_come.wait()
        assert not desk.calls[0].has_left
        call.cancel()
        await _until(lambda: desk.calls[0].has_left)
        desk.calls[0].reply(Response(200, b"late"))
        await task

    _run(test)


async def _wait(call: Any) -> None:
    with pytest.raises(asyncio.CancelledError):
        await call


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_a_deadline_is_known_and_ends_the_call() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        desk.answer = lambda call: None
        error = await _error(_call(channel, timeout=5))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        patience = desk.calls[0].patience
        assert patience is not None and 0 < patience < 10
        await _until(lambda: desk.calls[0].has_left)

    _run(test)


def test_health() -> None:
    async def test(desk: _Desk, channel: Any) -> None:
        def check(body: bytes = b"") -> Any:
            return _call(channel, body, "/grpc.health.v1.Health/Check")

        assert await check() == b"\x08\x01"
        assert await check(b"\x0a\x09a.Service") == b"\x08\x01"
        desk.ready = False
        assert await check() == b"\x08\x02"
        assert (await _error(check(b"\x0a\x01x"))).code() == grpc.StatusCode.NOT_FOUND
        assert (await _error(check(b"\x0a\xff"))).code() == grpc.StatusCode.INVALID_ARGUMENT

    _run(test)


def test_a_port_that_is_not_free() -> None:
    async def run() -> None:
        now = asyncio.get_running_loop().time
        first = GrpcListener(_Desk(), [], "127.0.0.1", 0, MOST, now)
        await first.start()
        second = GrpcListener(_Desk(), [], "127.0.0.1", first.port, MOST, now)
        with pytest.raises(InvalidArgumentError, match=f"--grpc-port {first.port}"):
            await second.start()
        await second.stop(0)
        await first.stop(0)

    asyncio.run(run())
