"""TensorFlow Serving's REST interface: predict, classify, regress, status and metadata.

    POST /v1/models/NAME[/versions/INT | /labels/LABEL]:(predict|classify|regress)
    GET  /v1/models/NAME[/versions/INT | /labels/LABEL][/metadata]

Source: `model_servers/http_rest_api_util.cc` of tensorflow/serving, and its documentation, "RESTful
API". It differs in these: a body must end with its JSON value; a shape that the signature does not
allow, and an integer outside its type's range, are refused before the model sees them; answers have
no white space.
"""

from __future__ import annotations

import functools
import json
import re
import urllib.parse
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from nanotf.serving import json_text
from nanotf.serving.interface import (
    Decoded,
    Interface,
    Refusal,
    Request,
    Response,
    RoutedRequest,
    ServedModel,
    ServerState,
)
from nanotf.serving.served_versions import known_states

if TYPE_CHECKING:
    import numpy as np

    from nanotf.inference.signature import Signature, TensorSpec

_OURS = re.compile(r"/v1/.*", re.IGNORECASE | re.DOTALL)
_OF = r"(?:(?:/versions/(\d+))|(?:/labels/([^/:]+)))?"
_FLAGS = re.IGNORECASE | re.ASCII
_CALL = re.compile(rf"/v1/models/([^/:]+){_OF}:(classify|regress|predict)", _FLAGS)
_QUESTION = re.compile(rf"/v1/models(?:/([^/:]+))?{_OF}(?:/(metadata))?", _FLAGS)
_LARGEST = 2**63 - 1  # version
# TensorFlow's names of types, where they are not NumPy's in upper case.
_TYPES = {"float16": "HALF", "float32": "FLOAT", "float64": "DOUBLE"}


class TensorflowRest(Interface):
    """Answers the clients of TensorFlow Serving's REST interface."""

    name: ClassVar[str] = "tensorflow_rest"

    # --------------------------------------------------------------------------- in the front
    def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, server: ServerState
    ) -> RoutedRequest | Response | None:
        """See `Interface.route`."""
        path = path.partition("?")[0]
        if not _OURS.fullmatch(path):
            return None
        if method == "OPTIONS":
            return _preflight(headers)
        if method == "POST" and (found := _CALL.fullmatch(path)):
            model, version, label = _chosen(found)
            request = Request(self.name, found[4].lower(), body)
            return RoutedRequest(request, model, version, label)
        if method == "GET" and (found := _QUESTION.fullmatch(path)):
            return self._answer_question(found, server)
        raise Refusal(400, f"Malformed request: {method} {path}")

    def refuse(self, refusal: Refusal) -> Response:
        """See `Interface.refuse`."""
        return Response(refusal.status, json_text.error_text(refusal.text))

    def _answer_question(self, found: re.Match[str], server: ServerState) -> Response:
        if not found[1]:
            raise Refusal(400, "Missing model name in request.")
        model, version, label = _chosen(found)
        if found[4]:
            return Response(200, server.described(self.name, model, version, label))
        if label is not None:
            described = json.loads(server.described(self.name, model, None, label))
            version = int(described["model_spec"]["version"])
        return _status(server, model, version)

    # --------------------------------------------------------------------------- in a worker
    def describe(self, model: ServedModel) -> bytes:
        """Returns the answer to a question for a model's metadata."""
        signatures = {name: _signature(each) for name, each in model.signatures.items()}
        spec = {"name": model.name, "signature_name": "", "version": str(model.version)}
        metadata = {"signature_def": {"signature_def": signatures}}
        return json.dumps({"model_spec": spec, "metadata": metadata}).encode()

    def decode(self, request: Request, model: ServedModel) -> Decoded:
        """See `Interface.decode`."""
        examples, predict = _bodies()
        content = json_text.parse_object(request.body)
        if request.verb in examples.VERBS:
            return cast(Decoded, examples.decode(content, model.signatures, request.verb))
        return cast(Decoded, predict.decode(content, model.signatures))

    def encode(
        self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
    ) -> Response:
        """See `Interface.encode`."""
        examples, predict = _bodies()
        if isinstance(decoded.form, examples.Examples):
            return cast(Response, examples.encode(decoded.form, outputs))
        return cast(Response, predict.encode(decoded, outputs))


@functools.cache
def _bodies() -> tuple[ModuleType, ModuleType]:
    """Imports the modules that need NumPy: the front imports this one, and does without."""
    from nanotf.serving import tensorflow_examples, tensorflow_predict

    return tensorflow_examples, tensorflow_predict


def _preflight(headers: Mapping[str, str]) -> Response:
    if not re.search("https?://", headers.get("origin", "")):
        raise Refusal(400, "Origin header is missing in CORS preflight")
    return Response(200, b"")


def _chosen(found: re.Match[str]) -> tuple[str, int | None, str | None]:
    """Returns the model, the version and the label of a path."""
    version, label = found[2], found[3]
    return (
        urllib.parse.unquote(found[1]),
        None if version is None else _number(version),
        None if label is None else urllib.parse.unquote(label),
    )


def _number(version: str) -> int:
    digits = version.lstrip("0")  # `int` refuses very long texts, even of zeros
    if len(digits) > len(str(_LARGEST)) or int(digits or "0") > _LARGEST:
        raise Refusal(400, f"Failed to convert version: {version} to numeric.")
    return int(digits or "0")


def _status(server: ServerState, model: str, version: int | None) -> Response:
    found = [
        {
            "version": str(number),
            "state": state,
            "status": {"error_code": "UNKNOWN" if error else "OK", "error_message": error},
        }
        for number, state, error in known_states(server, model, version)
    ]
    return Response(200, json.dumps({"model_version_status": found}).encode())


def _signature(signature: Signature) -> dict[str, Any]:
    return {
        "inputs": {spec.name: _tensor(spec) for spec in signature.inputs},
        "outputs": {spec.name: _tensor(spec) for spec in signature.outputs},
        "method_name": signature.method,
        "defaults": {},
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    sizes = ["-1" if length is None else str(length) for length in spec.shape or ()]
    return {
        "dtype": f"DT_{_TYPES.get(spec.dtype, spec.dtype.upper())}",
        "tensor_shape": {
            "dim": [{"size": size, "name": ""} for size in sizes],
            "unknown_rank": spec.shape is None,
        },
        "name": "",  # of a tensor in a graph; not every program has one
    }
