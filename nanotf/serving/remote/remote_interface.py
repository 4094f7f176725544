"""An interface that clients call by gRPC.

A call is a POST to the path of its method, as it is in HTTP/2; its body is the request's message as
protobuf writes it. Only what says which model is asked is read in the front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanotf.serving.interface import GRPC, Interface, Refusal, Response
from nanotf.serving.repository import wire_format
from nanotf.serving.repository.wire_format import NotWholeError

CONTENT_TYPE = "application/grpc"


class RemoteInterface(Interface):
    """Answers calls of some services."""

    entrypoint: ClassVar[str] = GRPC
    services: ClassVar[Mapping[str, tuple[str, ...]]]  # the methods, by the services' full names

    def refuse(self, refusal: Refusal) -> Response:
        """See `Interface.refuse`. The text is the call's status message."""
        return Response(refusal.status, refusal.text.encode(errors="replace"), CONTENT_TYPE)


def method_of(path: str) -> str:
    """Returns the name of the method that a path calls."""
    return path.rpartition("/")[2]


def message_answer(message: Any) -> Response:
    """Returns the answer that a message is."""
    return Response(200, message.SerializeToString(), CONTENT_TYPE)


def parsed(kind: Any, body: bytes) -> Any:
    """Reads a message.

    Args:
        kind: its class.

    Raises:
        Refusal: It is none. Status 400.
    """
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise _unreadable(error) from None


def submessage(body: bytes, number: int) -> bytes | None:
    """Returns a field of a message that is a message, without reading the others.

    Args:
        number: of the field. Pieces of one are merged by being joined.

    Returns:
        None if it is not there.

    Raises:
        Refusal: The message cannot be read. Status 400.
    """
    read = wire_format.reader_of_bytes(body)
    try:
        pieces = [
            body[start:end]
            for found, start, end in wire_format.fields(read, 0, len(body))
            if found == number and end >= 0
        ]
    except NotWholeError as error:
        raise _unreadable(error) from None
    return b"".join(pieces) if pieces else None


def _unreadable(error: Exception) -> Refusal:
    return Refusal(400, f"The request must be a message of the method's type: {error}")
