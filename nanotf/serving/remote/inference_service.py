"""The Open Inference Protocol (KServe's and Triton's "V2") over gRPC.

Source: `specification/protocol/open_inference_grpc.proto` of kserve/open-inference-protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import nanotf
from nanotf.serving.interface import (
    Decoded,
    Refusal,
    Request,
    Response,
    RoutedRequest,
    ServedModel,
    ServerState,
)
from nanotf.serving.open_inference import chosen_version
from nanotf.serving.remote.inference_messages import message_class
from nanotf.serving.remote.remote_interface import (
    RemoteInterface,
    field_of,
    message_answer,
    method_of,
    parsed,
)
from nanotf.serving.served_versions import is_served, served_versions

if TYPE_CHECKING:
    import numpy as np

_SERVICE = "inference.GRPCInferenceService"
_NAME, _VERSION = 1, 2  # numbers of fields in each request for a model


class InferenceService(RemoteInterface):
    """Answers the clients of the Open Inference Protocol over gRPC."""

    name: ClassVar[str] = "open_inference_grpc"
    services: ClassVar[Mapping[str, tuple[str, ...]]] = {
        _SERVICE: (
            "ServerLive",
            "ServerReady",
            "ServerMetadata",
            "ModelReady",
            "ModelMetadata",
            "ModelInfer",
        )
    }

    # --------------------------------------------------------------------------- in the front
    def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, server: ServerState
    ) -> RoutedRequest | Response | None:
        """See `Interface.route`."""
        if not path.startswith(f"/{_SERVICE}/"):
            return None
        called = method_of(path)
        if called in _ABOUT_SERVER:
            fields = _ABOUT_SERVER[called](server)
            return message_answer(message_class(f"{called}Response")(**fields))
        model = _text(body, _NAME)
        version = chosen_version(server, model, _text(body, _VERSION) or None)
        if called == "ModelReady":
            ready = is_served(server, model, version)
            return message_answer(message_class("ModelReadyResponse")(ready=ready))
        if called == "ModelMetadata":
            return self._metadata(server, model, version)
        return RoutedRequest(Request(self.name, "infer", body), model, version)

    def _metadata(self, server: ServerState, model: str, version: int | None) -> Response:
        described = json.loads(server.described(self.name, model, version, None))
        described["versions"] = [str(number) for number in served_versions(server, model)]
        return message_answer(message_class("ModelMetadataResponse")(**described))

    # --------------------------------------------------------------------------- in a worker
    def describe(self, model: ServedModel) -> bytes:
        """Returns the fields of a model's metadata, but for its versions, which the front knows."""
        from nanotf.serving import open_tensors

        return json.dumps(open_tensors.metadata(model)).encode()

    def decode(self, request: Request, model: ServedModel) -> Decoded:
        """See `Interface.decode`."""
        # Here and below: the front imports this module, and does without NumPy.
        from nanotf.serving.remote import inference_bodies

        return inference_bodies.decode(
            parsed(message_class("ModelInferRequest"), request.body), model
        )

    def encode(
        self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
    ) -> Response:
        """See `Interface.encode`."""
        from nanotf.serving.remote import inference_bodies

        return message_answer(inference_bodies.encode(decoded.form, outputs, model))


_ABOUT_SERVER: dict[str, Callable[[ServerState], dict[str, Any]]] = {
    "ServerLive": lambda server: {"live": True},
    "ServerReady": lambda server: {"ready": server.is_ready()},
    "ServerMetadata": lambda server: {"name": "nanotf", "version": nanotf.__version__},
}


def _text(body: bytes, number: int) -> str:
    """Returns a text field of a message, without reading the others."""
    try:
        return (field_of(body, number) or [b""])[-1].decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, f"Names must be UTF-8: {error}") from None
