"""The models of a worker, each with the code that answers its requests."""

from __future__ import annotations

from nanotf.sagemaker.serving.handler_code import HandlerCode
from nanotf.sagemaker.serving.local_rest import LocalRest
from nanotf.sagemaker.serving.model_code import BodyRules, ModelCode
from nanotf.sagemaker.serving.module_scopes import ModuleScopes
from nanotf.sagemaker.serving.toolkit_code import ToolkitCode
from nanotf.serving.interface import ServedModel
from nanotf.serving.tensorflow_rest import TensorflowRest


class WorkerModels:
    """The part of `Invocations` that is in a worker."""

    def __init__(self, rules: BodyRules) -> None:
        self._rules = rules
        self._scopes = ModuleScopes()
        self._rest = LocalRest(TensorflowRest(), rules.most)
        self._codes: dict[tuple[str, int], ModelCode] = {}

    def add(self, model: ServedModel) -> bool:
        """Loads a model's code, if it has any. Returns what `Interface.begin` returns."""
        self._rest.add(model)
        code = self._codes[model.name, model.version] = self._load(model)
        return code.computes

    def code_of(self, model: ServedModel) -> ModelCode:
        """Returns what answers a model's requests, whose modules become importable."""
        if model.code is not None:
            self._scopes.activate(model.code)
        return self._codes[model.name, model.version]

    def close(self) -> None:
        """Ends the REST server of handlers, and forgets the modules."""
        self._rest.close()
        self._scopes.close()

    def _load(self, model: ServedModel) -> ModelCode:
        if model.code is None:
            return ModelCode(model, self._rules)
        module = self._scopes.load(model.code)
        # First: a script for SageMaker's TensorFlow containers has this form, whatever else it has.
        if HandlerCode.is_in(module):
            return HandlerCode(module, model, self._rules, self._rest)
        return ToolkitCode(module, model, self._rules)
