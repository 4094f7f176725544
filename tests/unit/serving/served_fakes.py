"""A server and a model without processes, and the way of a request through an interface."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from nanotf.errors import NanoError
from nanotf.inference.signature import DEFAULT, PREDICT, Signature, TensorSpec
from nanotf.serving.interface import Interface, Refusal, Response, RoutedRequest, ServedModel
from nanotf.serving.served_versions import not_found

pytest.importorskip("orjson")

Arrays = Mapping[str, Any]


def spec(text: str) -> TensorSpec:
    """Reads such as "x:float32[?,8]", "x:string[]", and "x:float32*" of any rank."""
    name, _, rest = text.partition(":")
    dtype, bracket, axes = rest.rstrip("]").partition("[")
    if not bracket:
        return TensorSpec(name, dtype.rstrip("*"), None)
    return TensorSpec(
        name, dtype, tuple(None if a == "?" else int(a) for a in axes.split(",") if a)
    )


def signature(inputs: str, outputs: str, method: str = PREDICT) -> Signature:
    """Makes a signature of specs with spaces between them."""
    return Signature(tuple(map(spec, inputs.split())), tuple(map(spec, outputs.split())), method)


@dataclasses.dataclass
class FakeModel:
    """A model of one function, for all signatures."""

    signatures: dict[str, Signature]
    function: Callable[..., Arrays]
    name: str = "half"
    version: int = 123
    folder: pathlib.Path = pathlib.Path()

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        assert list(inputs) == list(self.signatures[signature].input_names)
        return dict(self.function(**inputs))


def half_plus(two: float, shape: str = "*", name: str = "half") -> FakeModel:
    """TensorFlow Serving's own example."""
    return FakeModel(
        {DEFAULT: signature(f"x:float32{shape}", f"y:float32{shape}")},
        lambda x: {"y": x * np.float32(0.5) + np.float32(two)},
        name,
    )


class FakeServer:
    """Serves models, each also under the label "stable"."""

    def __init__(self, interface: Interface, *models: ServedModel) -> None:
        self._interface = interface
        self.served = {model.name: model for model in models}
        self.other_states: dict[str, list[tuple[int, str, str]]] = {}
        self.default_model = models[0].name if models else None

    def models(self) -> list[str]:
        return list(self.served)

    def states(self, model: str) -> list[tuple[int, str, str]]:
        found = self.served.get(model)
        available = [] if found is None else [(found.version, "AVAILABLE", "")]
        return sorted(available + self.other_states.get(model, []), reverse=True)

    def found(self, model: str | None, version: int | None, label: str | None) -> ServedModel:
        found = self.served.get(model or "")
        if label not in (None, "stable"):
            raise Refusal(400, f"Unrecognized servable version label: {label}")
        if found is None or version not in (None, found.version):
            raise Refusal(404, not_found(model, version))
        return found

    def described(
        self, interface: str, model: str, version: int | None, label: str | None
    ) -> bytes:
        assert interface == self._interface.name
        return self._interface.describe(self.found(model, version, label))

    def is_ready(self) -> bool:
        return bool(self.served)


def ask(
    server: FakeServer,
    interface: Interface,
    method: str,
    path: str,
    body: bytes | str = b"",
    headers: Mapping[str, str] | None = None,
) -> Response | None:
    """Answers a request as a front and a worker do."""
    body = body.encode() if isinstance(body, str) else body
    try:
        call = interface.route(method, path, headers or {}, body, server)
        if not isinstance(call, RoutedRequest):
            return call
        model = server.found(call.model, call.version, call.label)
        decoded = interface.decode(call.request, model)
        outputs = model.run(decoded.inputs, decoded.signature)
        return interface.encode(decoded, outputs, model)
    except Refusal as refusal:
        return interface.refuse(refusal)
    except NanoError as error:
        return interface.refuse(Refusal(400, str(error)))


def content(answer: Response | None) -> Any:
    """Returns what an answer's JSON holds."""
    assert answer is not None and answer.content_type == "application/json"
    return json.loads(answer.body)


def error(answer: Response | None) -> tuple[int, str]:
    """Returns an answer's status and the text of its error."""
    value = content(answer)
    assert answer is not None and list(value) == ["error"]
    return answer.status, value["error"]
