"""A server and models without processes, and the way of a request through SageMaker's interface."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import pathlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from nanotf.errors import NanoError
from nanotf.inference.signature import DEFAULT, PREDICT, Signature, TensorSpec
from nanotf.sagemaker.serving.invocations import Invocations
from nanotf.serving.interface import Refusal, Response, RoutedRequest
from nanotf.serving.served_versions import not_found

pytest.importorskip("orjson")

JSON = "application/json"
JSON_LINES = "application/jsonlines"
CSV = "text/csv"
NPY = "application/x-npy"
NPZ = "application/x-npz"


@dataclasses.dataclass
class HostedModel:
    """A model of one function."""

    signatures: dict[str, Signature]
    function: Callable[..., Mapping[str, Any]]
    name: str = "half"
    version: int = 3
    code: pathlib.Path | None = None
    runs: int = 0

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path() if self.code is None else self.code.parent / str(self.version)

    def run(self, inputs: Mapping[str, Any], signature: str) -> dict[str, Any]:
        assert list(inputs) == list(self.signatures[signature].input_names)
        self.runs += 1
        return dict(self.function(**inputs))


def double(shape: tuple[int | None, ...] | None = (None, 2), dtype: str = "float32") -> HostedModel:
    """A model that returns its input twice as large."""
    return of_one(lambda x: {"y": x * np.array(2, x.dtype)}, shape, dtype)


def echo(shape: tuple[int | None, ...] | None, dtype: str) -> HostedModel:
    """A model that returns its input."""
    return of_one(lambda x: {"y": x}, shape, dtype)


def of_one(
    function: Callable[..., Mapping[str, Any]], shape: tuple[int | None, ...] | None, dtype: str
) -> HostedModel:
    tensors = (TensorSpec("x", dtype, shape),), (TensorSpec("y", dtype, shape),)
    return HostedModel({DEFAULT: Signature(*tensors, PREDICT)}, function)


def two_inputs() -> HostedModel:
    """A model that returns the sum and the difference of its inputs."""
    inputs = tuple(TensorSpec(name, "float32", (None, 2)) for name in "ab")
    outputs = tuple(TensorSpec(name, "float32", (None, 2)) for name in ("sum", "difference"))
    return HostedModel(
        {DEFAULT: Signature(inputs, outputs)}, lambda a, b: {"sum": a + b, "difference": a - b}
    )


class HostServer:
    """Serves models in this process."""

    def __init__(self, *models: HostedModel, **settings: Any) -> None:
        self.interface = Invocations(**settings)
        self.served = {model.name: model for model in models}
        self.default_model = models[0].name if len(models) == 1 else None
        self.ready, self.state = True, "AVAILABLE"
        self.computed_by_code = [self.interface.begin(model) for model in models]

    def models(self) -> list[str]:
        return list(self.served)

    def states(self, model: str) -> list[tuple[int, str, str]]:
        found = self.served.get(model)
        return [(found.version, self.state, "")] if found else []

    def described(self, *_: Any) -> bytes:
        raise AssertionError

    def is_ready(self) -> bool:
        return self.ready

    async def load(self, model: str, folder: pathlib.Path) -> None:
        await asyncio.sleep(0)
        if not folder.is_dir():
            raise Refusal(404, f"Could not find valid base path {folder} for servable {model}")
        self.served[model] = dataclasses.replace(double(), name=model)
        self.interface.begin(self.served[model])

    async def unload(self, model: str) -> None:
        await asyncio.sleep(0)
        del self.served[model]

    def ask(
        self, method: str, path: str, body: bytes | str = b"", **headers: str | None
    ) -> Response | None:
        """Answers a request as a front and a worker do. Names of headers have `_` for `-`."""
        body = body.encode() if isinstance(body, str) else body
        given = {name.replace("_", "-"): value for name, value in headers.items() if value}
        try:
            found = self.interface.route(method, path, given, body, self)
            if inspect.isawaitable(found):
                return asyncio.run(_waited(found))
            if not isinstance(found, RoutedRequest):
                return found
            return self._computed(found)
        except Refusal as refusal:
            return self.interface.refuse(refusal)
        except NanoError as error:
            return self.interface.refuse(Refusal(400, str(error)))

    def _computed(self, call: RoutedRequest) -> Response:
        model = self.served[call.model or ""]
        if self.state != "AVAILABLE" or call.version not in (None, model.version):
            raise Refusal(404, not_found(call.model, call.version))
        if answer := self.interface.answer(call.request, model):
            return answer
        decoded = self.interface.decode(call.request, model)
        outputs = model.run(decoded.inputs, decoded.signature)
        return self.interface.encode(decoded, outputs, model)

    def invoke(
        self, body: bytes | str, content_type: str | None = JSON, **headers: str | None
    ) -> Response:
        """Posts to /invocations."""
        answer = self.ask("POST", "/invocations", body, content_type=content_type, **headers)
        assert answer is not None
        return answer


async def _waited(found: Any) -> Any:
    return await found


def invoke(
    model: HostedModel, body: bytes | str, kind: str | None = JSON, **headers: Any
) -> Response:
    """Posts to a server of one model."""
    return HostServer(model).invoke(body, kind, **headers)


def value(answer: Response | None) -> Any:
    """Returns what the JSON of a successful answer holds."""
    assert answer is not None and answer.status == 200, answer
    return json.loads(answer.body)


def error(answer: Response | None) -> tuple[int, str]:
    """Returns an answer's status and the text of its error."""
    assert answer is not None and answer.content_type == JSON, answer
    content = json.loads(answer.body)
    assert list(content) == ["error"]
    return answer.status, content["error"]


def with_code(model: HostedModel, folder: pathlib.Path, script: str, **files: str) -> HostedModel:
    """Gives a model code; other files by name, without their suffix `.py`."""
    code = folder / "code"
    code.mkdir(parents=True)
    for name, text in {"inference": script, **files}.items():
        (code / f"{name}.py").write_text(textwrap.dedent(text))
    return dataclasses.replace(model, code=code)
