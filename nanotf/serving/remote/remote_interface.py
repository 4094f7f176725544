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
# Of a message, at its outermost level: inputs, filters. Each costs the front's only thread a
# microsecond, and a body of 100 MiB could have 50 million.
_MOST_FIELDS = 4096


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


def field_of(body: bytes, number: int) -> list[bytes]:
    """Returns each occurrence of a field of bytes, without reading the others.

    The pieces of a message are merged by being joined; of a text the last one counts.

    Args:
        body: the message that has the field.
        number: of the field.

    Raises:
        Refusal: The message cannot be read. Status 400.
    """
    pieces: list[bytes] = []
    fields = wire_format.fields(wire_format.reader_of_bytes(body), 0, len(body))
    try:
        for count, (found, start, end) in enumerate(fields):
            if count == _MOST_FIELDS:
                raise Refusal(400, f"A request must have at most {_MOST_FIELDS} fields.")
            if found == number and end >= 0:
                pieces.append(body[start:end])
    except NotWholeError as error:
        raise _unreadable(error) from None
    return pieces


def _unreadable(error: Exception) -> Refusal:
    return Refusal(400, f"The request must be a message of the method's type: {error}")
