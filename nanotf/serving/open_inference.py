"""The Open Inference Protocol (KServe's and Triton's "V2") over REST.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME[/versions/V][/ready]
    POST /v2/models/NAME[/versions/V]/infer

Source: `specification/protocol/inference_rest.md` of kserve/open-inference-protocol. A request is
for the signature "serving_default". The extension for binary data is not supported.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import nanotf
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
from nanotf.serving.served_versions import is_served, served_versions

if TYPE_CHECKING:
    import numpy as np

_OURS = re.compile(r"/v2(?:/.*)?", re.DOTALL)
_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(ready|infer))?/?")
_VERSION = re.compile(r"[0-9]{1,18}")  # below 2**63, whatever the digits
_BINARY = "inference-header-content-length"  # sent with the extension for binary data


class OpenInference(Interface):
    """Answers the clients of the Open Inference Protocol."""

    name: ClassVar[str] = "open_inference"

    # --------------------------------------------------------------------------- in the front
    def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, server: ServerState
    ) -> RoutedRequest | Response | None:
        """See `Interface.route`."""
        path = path.partition("?")[0]
        if not _OURS.fullmatch(path):
            return None
        if method == "GET" and (answer := _about_server(path.rstrip("/"), server)):
            return answer
        found = _MODEL.fullmatch(path)
        verb = found[3] if found else None
        if found is None or method != ("POST" if verb == "infer" else "GET"):
            raise Refusal(404, f"The protocol has no such request. Received: {method} {path}")
        model = urllib.parse.unquote(found[1])
        version = chosen_version(server, model, found[2])
        if verb == "ready":
            return _ready(server, model, version)
        if verb is None:
            return self._metadata(server, model, version)
        if _BINARY in headers:
            raise Refusal(
                400,
                "Tensors must be sent as JSON. Received: the extension for binary data. Let the "
                "client send and receive no binary data.",
            )
        return RoutedRequest(Request(self.name, "infer", body), model, version)

    def refuse(self, refusal: Refusal) -> Response:
        """See `Interface.refuse`."""
        return Response(refusal.status, json_text.error_text(refusal.text))

    def _metadata(self, server: ServerState, model: str, version: int | None) -> Response:
        described = json.loads(server.described(self.name, model, version, None))
        described["versions"] = [str(number) for number in served_versions(server, model)]
        return _answer(described)

    # --------------------------------------------------------------------------- in a worker
    def describe(self, model: ServedModel) -> bytes:
        """Returns a model's metadata but for its versions, which the front knows."""
        from nanotf.serving import open_tensors

        return json.dumps(open_tensors.metadata(model)).encode()

    def decode(self, request: Request, model: ServedModel) -> Decoded:
        """See `Interface.decode`."""
        # Here and below: the front imports this module, and does without NumPy.
        from nanotf.serving import open_tensors

        content = json_text.parse_object(request.body)
        return open_tensors.decode(content, model)

    def encode(
        self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
    ) -> Response:
        """See `Interface.encode`."""
        from nanotf.serving import open_tensors

        return open_tensors.encode(decoded.form, outputs, model)


def _about_server(path: str, server: ServerState) -> Response | None:
    if path == "/v2":
        return _answer({"name": "nanotf", "version": nanotf.__version__, "extensions": []})
    if path == "/v2/health/live":
        return _answer({"live": True})
    if path == "/v2/health/ready":
        ready = server.is_ready()
        # The specification's object has "live" by mistake; probes look at the status alone.
        return _answer({"ready": ready}, 200 if ready else 503)
    return None


def chosen_version(server: ServerState, model: str, version: str | None) -> int | None:
    """Returns the number of the version that a request names; None for the latest.

    Raises:
        Refusal: There is no such model, or the version is no number.
    """
    if not server.states(model):
        raise Refusal(404, f"The server must have the model. Received: {model}")
    if version is None:
        return None
    if not _VERSION.fullmatch(version):
        raise Refusal(400, f"A version must be a whole number. Received: {version}")
    return int(version)


def _ready(server: ServerState, model: str, version: int | None) -> Response:
    ready = is_served(server, model, version)
    return _answer({"name": model, "ready": ready}, 200 if ready else 503)


def _answer(value: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode())
