"""A request as it has come, by HTTP or by gRPC."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from nanotf.serving.interface import Response


@dataclasses.dataclass
class Incoming(abc.ABC):
    """A request as it has come."""

    entrypoint: ClassVar[str]  # see `Interface.entrypoint`

    method: str
    path: str  # percent-encoded, with the query
    headers: dict[str, str]  # names in lower case
    body: bytes
    began: float  # the loop's time

    @property
    @abc.abstractmethod
    def client(self) -> str:
        """The client's address."""

    @property
    @abc.abstractmethod
    def has_left(self) -> bool:
        """True if the client waits for no answer any more."""

    @property
    def patience(self) -> float | None:
        """The seconds for which the client waits, from `began`; None for any time."""
        return None

    @abc.abstractmethod
    def reply(self, answer: Response) -> None:
        """Sends the answer, unless the client has left. Called once."""
