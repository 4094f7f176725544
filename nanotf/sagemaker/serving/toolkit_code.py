"""User code in the form of SageMaker's Python servers: functions around the model.

    pre_model_fn(model_dir)                           before the model is loaded
    model_fn(model_dir)                               -> the model, of any kind; once in a worker
    model_warmup_fn(model_dir, model)                 after it is loaded
    input_fn(data, content_type)                      -> the model's input
    predict_fn(input, model)                          -> the prediction
    output_fn(prediction, accept)                     -> body, or body and content type
    transform_fn(model, data, content_type, accept)   -> in place of the last three
    transform_fn(data, content_type, accept)          the same, without the model

Each but the last may take one more argument, the context. Data of JSON and CSV is text, other data
is bytes. nanotf does what is not defined. Without `model_fn` the model is the program that is
served, and if there is no `predict_fn` either, requests of several clients are still computed
together. Sources: transformer.py and decoder.py of aws/sagemaker-inference-toolkit; serve.py
of aws/sagemaker-tensorflow-training-toolkit (branch legacy-mode).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanotf.errors import InvalidArgumentError
from nanotf.inference.signature import DEFAULT
from nanotf.sagemaker.serving import media_types, model_bodies, value_bodies
from nanotf.sagemaker.serving.model_code import SCRIPT_ERROR, BodyRules, ModelCode
from nanotf.sagemaker.serving.user_calls import answer_of, call, content_of
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import JSON, Decoded, Request, Response, ServedModel

_STEPS = ("input_fn", "predict_fn", "output_fn")
# The functions, and how many arguments they get beside the context.
_ARGUMENTS = {"pre_model_fn": 1, "model_fn": 1, "model_warmup_fn": 2, "transform_fn": 4}
_ARGUMENTS.update(dict.fromkeys(_STEPS, 2))
_WITHOUT_MODEL = 3  # arguments of `transform_fn` in its older form
_TEXTS = (JSON, media_types.CSV)


class ToolkitContext:
    """A request as functions see it: what they mostly use of a multi-model server's `Context`.

    Args:
        model_dir: the folder of the model's archive.
        headers: of the request, names in lower case; empty while the model is loaded.
    """

    def __init__(self, model_dir: str, headers: Mapping[str, str]) -> None:
        self.system_properties = {"model_dir": model_dir, "gpu_id": None, "batch_size": 1}
        self._headers = dict(headers)

    def get_request_header(self, index: int, name: str) -> str | None:
        """Returns a header of the request, or None.

        Args:
            index: always 0: functions get one request at a time.
            name: in any case.
        """
        return self._headers.get(name.lower())

    def get_all_request_header(self, index: int) -> dict[str, str]:
        """Returns all headers of the request, with names in lower case."""
        return dict(self._headers)


class ServedProgram:
    """The model that `predict_fn` and `transform_fn` get where there is no `model_fn`."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def __call__(self, inputs: Any, signature: str = DEFAULT) -> Any:
        """Computes rows.

        Args:
            inputs: an array or nested lists for a model of one input; else a dict by name.
            signature: the name of one of the model's signatures.

        Returns:
            The output as an array; a dict of arrays by name if there are several.

        Raises:
            NanoError: The inputs do not fit, or there is no such signature.
        """
        arrays = _checked(self._model, inputs, signature)
        return _only(self._model.run(arrays, signature))


@dataclasses.dataclass(frozen=True)
class _Form:
    """`Decoded.form`."""

    plain: model_bodies.BodyForm  # for nanotf's own part
    accept: str  # for `output_fn`
    headers: Mapping[str, str]


class ToolkitCode(ModelCode):
    """The functions of a model.

    Args:
        module: the user's.
        model, rules: see `ModelCode`.

    Raises:
        InvalidArgumentError: `transform_fn` is defined, and so is what it replaces; or a function
            has another number of parameters.
        NotImplementedError: None of the functions is defined.
        Exception: `model_fn`, or one of the two beside it, has raised it.
    """

    def __init__(self, module: types.ModuleType, model: ServedModel, rules: BodyRules) -> None:
        super().__init__(model, rules)
        assert model.code is not None
        self._folder = str(model.code.parent)
        self._functions = _functions(module)
        transform = self._functions.get("transform_fn")
        self._alone = transform is not None and _parameters(transform) == _WITHOUT_MODEL
        self.computes = "model_fn" in self._functions or self._alone
        self._loaded = self._load()

    # ---------------------------------------------------------------------- a request by itself
    def answer(self, request: Request) -> Response | None:
        """Answers a request, if the code does more than to read and write bodies.

        Raises:
            Refusal: 500, a function has raised an exception; or the request cannot be used.
        """
        functions, headers = self._functions, request.headers
        if "transform_fn" in functions:
            accept = self._accept(headers)
            about = (_data(request), headers.get("content-type"), accept)
            arguments = about if self._alone else (self._loaded, *about)
            return _answer("transform_fn", self._call("transform_fn", headers, *arguments), accept)
        if "model_fn" not in functions and "predict_fn" not in functions:
            return None
        data = self._input(request)
        if "predict_fn" in functions:
            prediction = self._call("predict_fn", headers, data, self._loaded)
        else:
            prediction = call(self._loaded, data)
        if "output_fn" in functions:
            return self._output(prediction, headers)
        kind = media_types.answer_type(headers.get("accept"), self.rules.accept)
        return Response(200, value_bodies.write(prediction, kind), kind)

    # ---------------------------------------------------------------------- rows beside others
    def decode(self, request: Request) -> Decoded:
        """See `Interface.decode`."""
        headers = request.headers
        # `output_fn` may write types of its own, which `answer_type` would refuse.
        accept = headers.get("accept") if "output_fn" not in self._functions else None
        kind = media_types.answer_type(accept, self.rules.accept)
        if "input_fn" in self._functions:
            inputs = _checked(self.model, self._input(request), DEFAULT)
            rows = common_rows(self.model.signatures[DEFAULT], inputs)
            decoded = Decoded(DEFAULT, inputs, rows, model_bodies.row_form(kind))
        else:
            decoded = model_bodies.decode(request, self.model, kind, self.rules.most)
        form = _Form(decoded.form, self._accept(headers), headers)
        return dataclasses.replace(decoded, form=form)

    def encode(self, decoded: Decoded, outputs: Mapping[str, np.ndarray[Any, Any]]) -> Response:
        """See `Interface.encode`."""
        if "output_fn" in self._functions:
            return self._output(_only(outputs), decoded.form.headers)
        plain = dataclasses.replace(decoded, form=decoded.form.plain)
        return model_bodies.encode(plain, outputs)

    # --------------------------------------------------------------------------------- the steps
    def _load(self) -> Any:
        """Returns the model that the functions get. What they raise ends the start."""
        context = ToolkitContext(self._folder, {})
        functions = self._functions
        loaded: Any = ServedProgram(self.model)
        if before := functions.get("pre_model_fn"):
            _with_context(before, 1, context)(self._folder)
        if load := functions.get("model_fn"):
            loaded = _with_context(load, 1, context)(self._folder)
        if warm_up := functions.get("model_warmup_fn"):
            _with_context(warm_up, 2, context)(self._folder, loaded)
        return loaded

    def _call(self, name: str, headers: Mapping[str, str], *arguments: Any) -> Any:
        context = ToolkitContext(self._folder, headers)
        return call(_with_context(self._functions[name], len(arguments), context), *arguments)

    def _accept(self, headers: Mapping[str, str]) -> str:
        """Returns the header as the user's functions get it."""
        accept = headers.get("accept")
        return self.rules.accept if accept in (None, "", "*/*") else accept

    def _input(self, request: Request) -> Any:
        kind = request.headers.get("content-type")
        if "input_fn" in self._functions:
            return self._call("input_fn", request.headers, _data(request), kind)
        return value_bodies.read(request.body, kind, self.rules.most)

    def _output(self, prediction: Any, headers: Mapping[str, str]) -> Response:
        accept = self._accept(headers)
        return _answer("output_fn", self._call("output_fn", headers, prediction, accept), accept)


def _functions(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    names = [name for name in _ARGUMENTS if getattr(module, name, None)]
    if not names:
        raise NotImplementedError(SCRIPT_ERROR)
    found = {name: getattr(module, name) for name in names}
    if "transform_fn" in found and any(name in found for name in _STEPS):
        raise InvalidArgumentError(
            f"transform_fn must not be defined beside {', '.join(_STEPS)}. Received: "
            f"{', '.join(found)}. Remove it or them."
        )
    for name, function in found.items():
        wanted, received = _ARGUMENTS[name], _parameters(function)
        older = name == "transform_fn" and received == _WITHOUT_MODEL
        if received not in (wanted, wanted + 1) and not older:
            raise InvalidArgumentError(
                f"{name} must have {wanted} parameters, or {wanted + 1} to get the context. "
                f"Received: a function with {received}."
            )
    return found


def _parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def _with_context(
    function: Callable[..., Any], arguments: int, context: ToolkitContext
) -> Callable[..., Any]:
    """Returns the function with its last argument bound, if it has a parameter for the context."""
    if _parameters(function) == arguments:
        return function

    @functools.wraps(function)  # `call` logs its name
    def bound(*values: Any) -> Any:
        return function(*values, context)

    return bound


def _data(request: Request) -> str | bytes:
    kind, charset = media_types.content_type(request.headers.get("content-type"))
    return media_types.decoded(request.body, charset) if kind in _TEXTS else request.body


def _answer(name: str, result: Any, accept: str) -> Response:
    if isinstance(result, tuple):
        return answer_of(name, result)
    return Response(200, content_of(name, result), accept)


def _checked(model: ServedModel, inputs: Any, name: str) -> dict[str, np.ndarray[Any, Any]]:
    signature = model.signatures.get(name)
    if signature is None:
        raise InvalidArgumentError(
            f"The signature must be one of the model's: {', '.join(model.signatures) or 'none'}. "
            f"Received: {name}."
        )
    if not isinstance(inputs, Mapping):
        if len(signature.inputs) != 1:
            raise InvalidArgumentError(
                f"The inputs must be {', '.join(signature.input_names)}. Received: "
                f"{type(inputs).__name__}. Pass a dict of arrays by name."
            )
        inputs = {signature.inputs[0].name: inputs}
    return signature.checked(inputs)


def _only(outputs: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Returns the output, if there is one."""
    return next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)
