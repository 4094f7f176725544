"""Takes calls by gRPC: one more way in, to the same desk as HTTP's.

grpcio parses HTTP/2 in threads of its own and wakes the loop. Messages are bytes here: nothing is
parsed that the interfaces do not ask for. `grpc.health.v1.Health` is answered here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Protocol

import grpc

from nanotf.errors import InvalidArgumentError
from nanotf.serving.front.incoming import Incoming
from nanotf.serving.front.status_names import status_name
from nanotf.serving.interface import GRPC, Refusal, Response
from nanotf.serving.message_tables import INT32, STRING, Tables, message_classes
from nanotf.serving.remote.remote_interface import RemoteInterface, message_answer, parsed

# Bytes of an error's text. A status travels in headers, of which clients accept 8 KiB; each byte
# may take three.
_MOST_TEXT = 2000
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING, _NOT_SERVING = 1, 2
# Source: doc/health-checking.md of grpc/grpc. Kubernetes and clients that balance call `Check`.
_TABLES: Tables = {
    "HealthCheckRequest": [("service", 1, STRING, "")],
    "HealthCheckResponse": [("status", 1, INT32, "")],
}
_Answer = Callable[[bytes, Any], Awaitable[bytes]]  # of a request's message and its context


@dataclasses.dataclass
class GrpcCall(Incoming):
    """A call as it has come."""

    entrypoint: ClassVar[str] = GRPC

    peer: str  # the client, as gRPC names it; gRPC crashes if it is asked after the call has ended
    answer: asyncio.Future[Response]
    seconds: float | None  # until the client's deadline

    @property
    def client(self) -> str:
        """The client's address."""
        return client_of(self.peer)

    @property
    def has_left(self) -> bool:
        """True if the call was cancelled, or its deadline has passed."""
        return self.answer.cancelled()

    @property
    def patience(self) -> float | None:
        """The seconds until the client's deadline; None for none."""
        return self.seconds

    def reply(self, answer: Response) -> None:
        """Hands the answer to the call."""
        if not self.answer.done():
            self.answer.set_result(answer)


class CallDesk(Protocol):
    """The place where calls are answered."""

    def take(self, incoming: Incoming) -> None:
        """Answers a call, now or later."""

    def is_ready(self) -> bool:
        """Returns True if each model can be asked."""


class GrpcListener:
    """Listens for calls. It is made in a running loop.

    Args:
        desk: what answers.
        interfaces: whose methods may be called; others are UNIMPLEMENTED.
        host: the address to listen on.
        port: 0 for any that is free.
        most_bytes: of a request's message.
        now: returns the loop's time.

    Attributes:
        port: int, on which it listens, once `start` has returned.
    """

    def __init__(
        self,
        desk: CallDesk,
        interfaces: Sequence[RemoteInterface],
        host: str,
        port: int,
        most_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self._desk, self._now = desk, now
        self._loop = asyncio.get_running_loop()
        self._services = {name for each in interfaces for name in each.services}
        self._messages = message_classes("grpc.health.v1", _TABLES)
        answers: dict[str, _Answer] = {
            f"/{service}/{method}": functools.partial(self._call, f"/{service}/{method}")
            for each in interfaces
            for service, methods in each.services.items()
            for method in methods
        }
        answers[_HEALTH] = self._check
        self._server = grpc.aio.server(
            handlers=(_Handlers(answers),),
            options=[
                ("grpc.max_receive_message_length", most_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # two servers on a port would share its calls
            ],
        )
        self._host, self.port = host, port

    async def start(self) -> None:
        """Takes calls from now on.

        Raises:
            InvalidArgumentError: It cannot listen on the address.
        """
        host = f"[{self._host}]" if ":" in self._host else self._host
        why = "it is not free"
        try:
            port = int(self._server.add_insecure_port(f"{host}:{self.port}"))
        except RuntimeError as error:  # of some versions of grpcio; others return 0
            port, why = 0, str(error)
        if not port:
            raise InvalidArgumentError(
                f"The server must be able to listen on its address. Received: {self._host}, "
                f"--grpc-port {self.port}: {why}. Choose another port, or 0 for any that is free."
            )
        self.port = port
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Takes no more calls, and waits for those that it has. It may not have started.

        Args:
            seconds: after which calls are cancelled.
        """
        await self._server.stop(seconds)

    async def _call(self, path: str, body: bytes, context: Any) -> bytes:
        # Those whose names end in "-bin" have bytes.
        headers = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        answer = self._loop.create_future()
        left = context.time_remaining()
        peer = str(context.peer())
        call = GrpcCall("POST", path, headers, body, self._now(), peer, answer, left)
        self._desk.take(call)
        return await _sent(await answer, context)  # a cancelled call cancels the future

    async def _check(self, body: bytes, context: Any) -> bytes:
        try:
            service = parsed(self._messages["HealthCheckRequest"], body).service
        except Refusal as refusal:
            return await _sent(Response(refusal.status, refusal.text.encode()), context)
        if service and service not in self._services:
            return await _sent(Response(404, b"unknown service"), context)
        status = _SERVING if self._desk.is_ready() else _NOT_SERVING
        return message_answer(self._messages["HealthCheckResponse"](status=status)).body


def client_of(peer: str) -> str:
    """Returns the address in gRPC's name of a peer, such as "ipv4:10.0.0.1:5000"."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


async def _sent(answer: Response, context: Any) -> bytes:
    """Returns the message of an answer, or ends the call with its error."""
    if answer.status < 400:
        return answer.body
    # The cut may go through a character.
    text = answer.body[:_MOST_TEXT].decode(errors="ignore")
    code = grpc.StatusCode[status_name(answer.status)]
    await context.abort(code, text, tuple(answer.headers))
    raise AssertionError("abort raises")


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds what answers a method. None of them reads or writes messages."""

    def __init__(self, answers: dict[str, _Answer]) -> None:
        self._handlers = {
            path: grpc.unary_unary_rpc_method_handler(answer) for path, answer in answers.items()
        }

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)
