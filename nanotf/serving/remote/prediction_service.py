"""TensorFlow Serving's services of gRPC: `PredictionService` and `ModelService`.

Source: `apis/prediction_service.proto`, `apis/model_service.proto` and
`servables/tensorflow/*_impl.cc` of tensorflow/serving. It differs in these: a failed precondition
is INVALID_ARGUMENT; numbers of another type than the signature's are converted as by
`Signature.checked`; streamed predictions, sessions and requests to reload the
configuration are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nanotf.serving.interface import (
    Decoded,
    Refusal,
    Request,
    Response,
    RoutedRequest,
    ServedModel,
    ServerState,
)
from nanotf.serving.remote import serving_messages
from nanotf.serving.remote.remote_interface import (
    RemoteInterface,
    field_of,
    message_answer,
    method_of,
    parsed,
)
from nanotf.serving.remote.serving_messages import message_class
from nanotf.serving.served_versions import known_states

if TYPE_CHECKING:
    import numpy as np

_PREDICTIONS, _MODELS = "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"
# By method: the word for it in `Request.verb` and in the metrics.
_VERBS = {
    "Predict": "predict",
    "Classify": "classify",
    "Regress": "regress",
    "MultiInference": "multi_inference",
}
_METADATA, _STATUS = "GetModelMetadata", "GetModelStatus"
_SPEC = 1  # the number of the field `model_spec` in each message but `MultiInferenceRequest`
_TASKS = 1  # the number of the field `tasks` in that one


class PredictionService(RemoteInterface):
    """Answers the clients of TensorFlow Serving's gRPC services.

    Args:
        most: bytes of one array of a request: a message may state a large shape and one value.
    """

    name: ClassVar[str] = "tensorflow_grpc"
    services: ClassVar[Mapping[str, tuple[str, ...]]] = {
        _PREDICTIONS: (*_VERBS, _METADATA),
        _MODELS: (_STATUS,),
    }

    def __init__(self, most: int) -> None:
        self._most = most

    # --------------------------------------------------------------------------- in the front
    def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, server: ServerState
    ) -> RoutedRequest | Response | None:
        """See `Interface.route`."""
        called = method_of(path)
        if called == _STATUS:
            return self._status(body, server)
        if called == _METADATA:
            return self._metadata(body, server)
        if called not in _VERBS or not path.startswith(f"/{_PREDICTIONS}/"):
            return None
        if _VERBS[called] == "multi_inference":
            spec = _spec_of_tasks(body)
        else:
            spec = _spec(field_of(body, _SPEC))
        model, version, label = _chosen(spec)
        return RoutedRequest(Request(self.name, _VERBS[called], body), model, version, label)

    def _metadata(self, body: bytes, server: ServerState) -> Response:
        request = parsed(message_class("GetModelMetadataRequest"), body)
        model, version, label = _chosen(_spec(field_of(body, _SPEC)))
        if not request.metadata_field:
            raise Refusal(400, "GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != serving_messages.METADATA_FIELD:
                raise Refusal(400, f"MetadataField {field} is not supported")
        described = server.described(self.name, model, version, label)
        return message_answer(parsed(message_class("GetModelMetadataResponse"), described))

    def _status(self, body: bytes, server: ServerState) -> Response:
        model, version, label = _chosen(_spec(field_of(body, _SPEC)))
        if label is not None:
            described = server.described(self.name, model, None, label)
            found = parsed(message_class("GetModelMetadataResponse"), described)
            version = int(found.model_spec.version.value)
        answer = message_class("GetModelStatusResponse")()
        for number, state, error in known_states(server, model, version):
            status = answer.model_version_status.add(
                version=number, state=serving_messages.STATES[state]
            )
            status.status.error_message = error
            status.status.error_code = serving_messages.UNKNOWN_ERROR if error else 0
        return message_answer(answer)

    # --------------------------------------------------------------------------- in a worker
    def describe(self, model: ServedModel) -> bytes:
        """Returns the answer to a question for a model's metadata."""
        # Here and below: the front imports this module, and does without NumPy.
        from nanotf.serving.remote import serving_bodies

        return serving_bodies.metadata(model)

    def answer(self, request: Request, model: ServedModel) -> Response | None:
        """Answers `MultiInference`, which asks for several signatures; see `Interface.answer`."""
        if request.verb != "multi_inference":
            return None
        from nanotf.serving.remote import serving_bodies

        return serving_bodies.multi_inference(request.body, model)

    def decode(self, request: Request, model: ServedModel) -> Decoded:
        """See `Interface.decode`."""
        from nanotf.serving.remote import serving_bodies

        if request.verb == "predict":
            return serving_bodies.decode_predict(request.body, model, self._most)
        return serving_bodies.decode_examples(request.body, model, request.verb)

    def encode(
        self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
    ) -> Response:
        """See `Interface.encode`."""
        from nanotf.serving.remote import serving_bodies

        return serving_bodies.encode(decoded, outputs, model)


def _spec(pieces: list[bytes]) -> Any:
    if not pieces:
        raise Refusal(400, "Missing ModelSpec")
    return parsed(message_class("ModelSpec"), b"".join(pieces))


def _spec_of_tasks(body: bytes) -> Any:
    """Returns what names the model of a `MultiInference`: all its tasks are for one."""
    tasks = field_of(body, _TASKS)
    if not tasks:
        raise Refusal(400, "Inference request must have at least one task")
    specs = [parsed(message_class("InferenceTask"), task).model_spec for task in tasks]
    if any(_chosen(spec) != _chosen(specs[0]) for spec in specs):
        raise Refusal(400, "All ModelSpecs in a MultiInferenceRequest must access the same model.")
    return specs[0]


def _chosen(spec: Any) -> tuple[str, int | None, str | None]:
    """Returns the model, the version and the label that a ModelSpec names."""
    if not spec.name:
        raise Refusal(400, "ModelSpec has no name.")
    choice = spec.WhichOneof("choice")
    return (
        spec.name,
        int(spec.version.value) if choice == "version" else None,
        spec.version_label if choice == "version_label" else None,
    )
