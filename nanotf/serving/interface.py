"""An interface: how clients ask for predictions, such as TensorFlow Serving's REST.

    client      front                                 worker
      | POST ->  | `route` finds the model, and       |
      |          | passes the body on as it came      | `decode` makes arrays of it,
      |          |  -- Request -->                    | the model computes the rows of several
      | <- text  |  <-- Response --                     | requests at once, `encode` makes an answer

The front knows neither arrays nor models, so that it stays small and its only thread fast. All that
depends on a request's content happens in a worker. One request that cannot be used fails no other.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np

    from nanotf.inference.signature import Signature

JSON = "application/json"
ENCODING = "content-encoding"  # the header of a compressed body
REST, GRPC = "REST", "GRPC"  # how requests come in, in the words of TensorFlow Serving's metrics


class Refusal(Exception):
    """A request that cannot be answered as asked.

    Args:
        status: the HTTP status, from 400 to 599.
        text: what was wrong, for the client.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


@dataclasses.dataclass(frozen=True)
class Request:
    """A client's question about one model, on its way from the front to a worker."""

    interface: str  # `Interface.name`
    verb: str  # what the interface calls it, such as "predict"
    body: bytes
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names in lower case


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer that a client gets."""

    status: int  # of HTTP
    body: bytes
    content_type: str = JSON  # empty for no such header
    headers: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class RoutedRequest:
    """A request that workers answer, and the model that it is for."""

    request: Request
    model: str | None  # None for the server's default model
    version: int | None = None  # None for the latest
    label: str | None = None  # of a version; excludes `version`


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A request's content."""

    signature: str  # the name of one of the model's signatures
    inputs: Mapping[str, np.ndarray[Any, Any]]  # as `Signature.checked` returns them
    # The rows, along the first axis of each input. None if the arrays do not all have rows, as the
    # column format allows: such a request is computed by itself.
    rows: int | None
    form: Any = None  # what `encode` needs to know, such as the format of the answer


class ServedModel(Protocol):
    """A model as the interfaces see it, in a worker."""

    name: str
    version: int
    folder: pathlib.Path  # what was unpacked or named: a version's folder, or a `.keras` file
    code: pathlib.Path | None  # the folder of code that lies beside it

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The signatures by name; empty for a model that an interface computes by itself."""

    def run(
        self, inputs: Mapping[str, np.ndarray[Any, Any]], signature: str
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Computes the outputs, by name.

        Args:
            inputs: as `Signature.checked` returns them.

        An interface may call it from another thread while the worker waits for `answer`.
        """


class ServerState(Protocol):
    """The models of a server as the interfaces see them, in the front."""

    @property
    def default_model(self) -> str | None:
        """The model of requests that name none; None if they must name one."""

    def models(self) -> list[str]:
        """Returns the names of the models."""

    def states(self, model: str) -> list[tuple[int, str, str]]:
        """Returns the versions of a model that the server has known, latest first.

        Returns:
            Of each its number, its state in TensorFlow Serving's words ("LOADING", "AVAILABLE",
            "END"), and why it could not be loaded, or an empty text. An empty list if
            there is no such model.
        """

    def described(
        self, interface: str, model: str, version: int | None, label: str | None
    ) -> bytes:
        """Returns what `Interface.describe` has said of a model's version in a worker.

        Raises:
            Refusal: There is no such version.
        """

    def is_ready(self) -> bool:
        """Returns True if workers serve each model, but for those that clients have added."""

    async def load(self, model: str, folder: pathlib.Path) -> None:
        """Adds a model, and waits until a version is served.

        Args:
            model: its name.
            folder: what `nanotf serve` accepts.

        Raises:
            Refusal: 409, there is a model of this name; 404, the folder holds none; 507, the memory
                does not suffice; 500, the model cannot be served.
        """

    async def unload(self, model: str) -> None:
        """Removes a model, after the requests that wait for it.

        Raises:
            Refusal: 404, there is no such model.
        """


class Interface(abc.ABC):
    """A kind of requests. Each worker gets a copy of the object in the front."""

    name: ClassVar[str]
    entrypoint: ClassVar[str] = REST  # or `GRPC`: an interface gets only what comes in there

    # --------------------------------------------------------------------------- in the front
    @abc.abstractmethod
    def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, server: ServerState
    ) -> RoutedRequest | Response | Awaitable[Response] | None:
        """Finds what a request asks for.

        Args:
            method: of HTTP, in upper case. A call of gRPC is a POST.
            path: with its query, as it came: percent-encoded. That of a call of gRPC is
                "/<service>/<method>".
            headers: names in lower case.

        Returns:
            What a worker is to answer; or the answer, which may take time and be refused then; or
            None for a request that belongs to another interface.

        Raises:
            Refusal: The request belongs to this interface, and cannot be used.
        """

    @abc.abstractmethod
    def refuse(self, refusal: Refusal) -> Response:
        """Returns the answer to a request that cannot be answered, here or in a worker."""

    # --------------------------------------------------------------------------- in a worker
    def begin(self, model: ServedModel) -> bool:
        """Prepares for a model, such as by loading code that lies beside it.

        Returns:
            True if this interface computes by itself what the model is to compute: it then need not
            be a program.

        Raises:
            Exception: The model cannot be served.
        """
        return False

    def describe(self, model: ServedModel) -> bytes:
        """Returns what `route` is to know of a model, see `ServerState.described`."""
        return b""

    def answer(self, request: Request, model: ServedModel) -> Response | None:
        """Answers a request by itself; or returns None, so that `decode` and `encode` do.

        Raises:
            Refusal: It cannot be answered.
        """
        return None

    @abc.abstractmethod
    def decode(self, request: Request, model: ServedModel) -> Decoded:
        """Reads a request's body.

        Raises:
            Refusal: It cannot be used.
            NanoError: As `Signature.checked`; the client gets the text, with status 400.
        """

    @abc.abstractmethod
    def encode(
        self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
    ) -> Response:
        """Makes the answer of a model's outputs for the request's rows.

        Raises:
            Refusal: The interface has no form for such outputs.
        """
