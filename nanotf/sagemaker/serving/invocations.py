"""SageMaker's hosting interface: what an endpoint's container answers.

    GET  /ping                     200 if all models are served, else 502
    POST /invocations              a prediction, of the model that a header names or the default one
    GET  /models[/NAME]            the models and their versions
    POST /models/NAME/invoke       a prediction
    POST /models                   loads a model (only for a server of models that come and go)
    DELETE /models/NAME            unloads it (the same)

Sources: "Use Your Own Inference Code with Hosting Services" and "Contract for Custom Containers to
Deploy Multiple Models" in SageMaker's documentation; aws/sagemaker-tensorflow-serving-container.
The bodies: `model_bodies`. A user's code: `handler_code`, `toolkit_code`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, unquote

from nanotf.sagemaker.serving.attributes_header import TARGET, attributes_of
from nanotf.serving.interface import (
    JSON,
    Decoded,
    Interface,
    Refusal,
    Request,
    Response,
    RoutedRequest,
    ServedModel,
    ServerState,
)
from nanotf.serving.json_text import error_text, parse_object
from nanotf.serving.repository.model_layouts import FILE_ENDINGS
from nanotf.serving.tensorflow_rest import TensorflowRest

if TYPE_CHECKING:
    import numpy as np

    from nanotf.sagemaker.serving.worker_models import WorkerModels

_ROOTS = ("ping", "invocations", "models")  # other paths are another interface's
_METHODS = ("predict", "classify", "regress")
MOST = 100 * 2**20  # bytes, as SAGEMAKER_MAX_PAYLOAD_IN_MB if it is not set


class Invocations(Interface):
    """Answers the clients of a SageMaker endpoint.

    Args:
        multi_model: whether clients may load and unload models.
        accept: the type of an answer for a client that takes any.
        most: bytes of a body, and of the arrays in a compressed one.
    """

    name: ClassVar[str] = "invocations"

    def __init__(self, *, multi_model: bool = False, accept: str = JSON, most: int = MOST) -> None:
        self._multi_model, self._accept, self._most = multi_model, accept, most
        self._models: WorkerModels | None = None

    # --------------------------------------------------------------------------- in the front
    def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, server: ServerState
    ) -> RoutedRequest | Response | Awaitable[Response] | None:
        """See `Interface.route`."""
        parts = [unquote(part) for part in path.partition("?")[0].split("/")[1:]]
        if not parts or parts[0] not in _ROOTS:
            return None
        match method, parts:
            case "GET", ["ping"]:
                return Response(200 if server.is_ready() else 502, b"", "")
            case "POST", ["invocations"]:
                return _routed(_target(headers, server), headers, body, server)
            case "POST", ["models", name, "invoke"] if name:
                return _routed(name, headers, body, server)
            case "GET", ["models"]:
                found = {name: _versions(name, server) for name in server.models()}
                return Response(200, json.dumps(found).encode())
            case "GET", ["models", name] if name:
                _check_loaded(name, server)
                return Response(200, json.dumps(_versions(name, server)).encode())
            case ("POST", ["models"]) | ("DELETE", ["models", _]):
                return self._change(parts, body, server)
        raise Refusal(404, "Not Found")

    def refuse(self, refusal: Refusal) -> Response:
        """See `Interface.refuse`."""
        return Response(refusal.status, error_text(refusal.text))

    def _change(self, parts: list[str], body: bytes, server: ServerState) -> Awaitable[Response]:
        if not self._multi_model:
            raise Refusal(
                404, "Models can be loaded and unloaded only with SAGEMAKER_MULTI_MODEL=true."
            )
        if len(parts) > 1:
            return _unload(parts[1], server)
        wanted = parse_object(body)
        name, place = wanted.get("model_name"), wanted.get("url")
        if not (isinstance(name, str) and name and isinstance(place, str) and place):
            raise Refusal(400, "The body must be an object with the texts model_name and url.")
        if name in server.models():
            raise Refusal(409, f"Model {name} is already loaded.")
        return _load(name, pathlib.Path(place), server)

    # --------------------------------------------------------------------------- in a worker
    def begin(self, model: ServedModel) -> bool:
        """Loads the model's code, if there is any. See `Interface.begin`."""
        return self._in_worker().add(model)

    def answer(self, request: Request, model: ServedModel) -> Response | None:
        """See `Interface.answer`."""
        return self._in_worker().code_of(model).answer(request)

    def decode(self, request: Request, model: ServedModel) -> Decoded:
        """See `Interface.decode`."""
        return self._in_worker().code_of(model).decode(request)

    def encode(
        self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
    ) -> Response:
        """See `Interface.encode`."""
        return self._in_worker().code_of(model).encode(decoded, outputs)

    def close(self) -> None:
        """Ends what `begin` has started."""
        if self._models is not None:
            self._models.close()
            self._models = None

    def _in_worker(self) -> WorkerModels:
        if self._models is None:
            # The front imports this module, and does without NumPy.
            from nanotf.sagemaker.serving.model_code import BodyRules
            from nanotf.sagemaker.serving.worker_models import WorkerModels

            self._models = WorkerModels(BodyRules(self._accept, self._most))
        return self._models


def _target(headers: Mapping[str, str], server: ServerState) -> str:
    """Returns the model that the header for it names: SageMaker's clients name the model's file."""
    named = headers.get(TARGET, "")
    if named in server.models():  # a model's own name may end like a file's
        return named
    return next((named.removesuffix(e) for e in FILE_ENDINGS if named.endswith(e)), named)


def _routed(
    named: str, headers: Mapping[str, str], body: bytes, server: ServerState
) -> RoutedRequest:
    """Returns the request for a model.

    Args:
        named: the model's name in the path or in the header for it; empty if it is in neither.
    """
    given = attributes_of(headers)
    model = named or given.get("tfs-model-name") or server.default_model
    if model is None:
        raise Refusal(
            400,
            "Invocation request does not contain model name. Name one with the header "
            f"X-Amzn-SageMaker-Custom-Attributes: tfs-model-name=... of {_known(server)}.",
        )
    _check_loaded(model, server)
    verb = given.get("tfs-method", _METHODS[0])
    if verb not in _METHODS:
        raise Refusal(
            400, f"tfs-method must be one of {', '.join(_METHODS)}. Received: {verb!r:.200}."
        )
    version = _version(given)
    # `HandlerCode` finds the model's name in this header, also one that the path has.
    about = {**headers, TARGET: named} if named else dict(headers)
    return RoutedRequest(Request(Invocations.name, verb, body, about), model, version)


def _version(given: Mapping[str, str]) -> int | None:
    text = given.get("tfs-model-version")
    if text is None:
        return None
    # 20 digits hold any number of 64 bits; `int` refuses a text of thousands.
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise Refusal(400, f"tfs-model-version must be a number. Received: {text!r:.200}.")
    return int(text)


def _check_loaded(model: str, server: ServerState) -> None:
    if model not in server.models():
        raise Refusal(404, f"Model {model} is not loaded yet. The server has {_known(server)}.")


def _known(server: ServerState) -> str:
    return ", ".join(server.models()) or "no models"


def _versions(model: str, server: ServerState) -> Any:
    """Returns a model's versions in TensorFlow Serving's words, as the containers list them."""
    path = f"/v1/models/{quote(model, safe='')}"
    found = TensorflowRest().route("GET", path, {}, b"", server)
    assert isinstance(found, Response)
    return json.loads(found.body)


async def _load(model: str, place: pathlib.Path, server: ServerState) -> Response:
    await server.load(model, place)
    return Response(200, json.dumps({"success": f"Successfully loaded model {model}."}).encode())


async def _unload(model: str, server: ServerState) -> Response:
    _check_loaded(model, server)
    await server.unload(model)
    return Response(200, json.dumps({"success": f"Successfully unloaded model {model}."}).encode())
