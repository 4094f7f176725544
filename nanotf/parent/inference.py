"""`evaluate` and `predict` with `num_processes`, in the parent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanotf.compat import (
    keras_common,
    keras_metrics,
    keras_models,
    keras_runs,
    keras_steps,
)
from nanotf.compat.generation import generation
from nanotf.errors import InvalidArgumentError
from nanotf.parent import call_readers, gpu, rejections
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.model_call import ModelCall
from nanotf.parent.reading.fit_data import Stream
from nanotf.parent.where import Where
from nanotf.pool.pool import Delivery
from nanotf.shipping import orders
from nanotf.shipping.data import inputs, outputs
from nanotf.wire import messages
from nanotf.wire.blocks import Block


def evaluate(call: KerasCall, where: Where, read_processes: Any = None) -> Any:
    """Evaluates a compiled model, on workers or in this process.

    Args:
        call: the call of Keras's `evaluate`.
        where: the place and number of workers.
        read_processes: as the user passed it.

    Returns:
        The result of Keras's `evaluate`.

    Raises:
        NanoError: As in `Model.fit`.
        Exception: What Keras raises.
    """
    with call_readers.attached(call_readers.check(read_processes), call, where) as read:
        if where.has_workers and read.call.given is not None:
            generation().check_compiled(call.model, "evaluate")
            return _run(_EvaluateCall, read.call, where.avoiding(read.cores))
        try:
            return read.call()
        finally:
            # Inside `fit`, Keras may use the iterator again in the next epoch.
            if "_use_cached_eval_dataset" not in call.kwargs:
                keras_steps.let_go(call.model.test_function)


def predict(call: KerasCall, where: Where, read_processes: Any = None) -> Any:
    """Computes a model's outputs, on workers or in this process; see `evaluate`."""
    with call_readers.attached(call_readers.check(read_processes), call, where) as read:
        if where.has_workers and read.call.given is not None:
            return _run(_PredictCall, read.call, where.avoiding(read.cores))
        return read.call()


def _run(kind: type[_Inference], keras_call: KerasCall, where: Where) -> Any:
    model, given = keras_call.model, keras_call.given
    assert given is not None
    plan = where.plan(kind.method)
    keras_call.warn_of_bypass()
    call = kind(model, given, where.size)
    if plan is None:
        return gpu.run_here(model, kind.method, given, where.size)
    return call.run_on(where, plan)


class _Inference(ModelCall):
    """Base of `evaluate` and `predict`: one pass over the data that changes no weight."""

    method: str
    hooks: frozenset[str]  # hooks that workers report; the others are called here
    stop_flag: str  # the model's attribute by which a callback ends the pass in Keras 3

    def __init__(self, model: Any, given: Mapping[str, Any], size: int) -> None:
        self.return_dict = bool(given.get("return_dict", False))
        known = {name: value for name, value in given.items() if name != "return_dict"}
        if "steps" in known:
            known["steps_per_epoch"] = known.pop("steps")
        super().__init__(model, FitArguments.of({**known, "shuffle": False}), size)
        if self.data.is_endless and self.arguments.steps_per_epoch is None:
            raise InvalidArgumentError(
                f"{self.method}() of an endless dataset never ends. Received: steps=None and a "
                "dataset that repeats forever. Pass the number of batches: steps=..."
            )

    def begin(self) -> list[Block]:
        a, model = self.arguments, self.model
        self.callbacks = ParentCallbacks(
            a.callbacks, model, a.verbose, 1, self.data.steps, generation().PASSES_ADD_A_HISTORY
        )
        self.callbacks.waits &= self.hooks
        self.callbacks.events &= self.hooks
        if generation().PASSES_CAN_BE_STOPPED:
            setattr(model, self.stop_flag, False)
        self.on_begin()  # may change the weights during the pass
        blocks = self.state_and_blocks()
        self.state.store(0)
        return blocks

    def on_begin(self) -> None:
        """Calls the hook that opens the pass, in all callbacks."""
        raise NotImplementedError

    def reply(self, first: messages.Waiting) -> messages.Proceed:
        self.callbacks.call(first.hook, first.index, self.logs_at(first))
        return messages.Proceed(self.number, stop=bool(getattr(self.model, self.stop_flag, False)))

    def logs_at(self, waiting: messages.Waiting) -> Any:
        """Returns the logs that callbacks get at a hook of a batch."""
        return waiting.logs

    def take_over(self, left: orders.Left) -> None:
        """Copies the changes of a pass to the user's model."""
        keras_runs.set_step_count(self.model, self.method, left.steps)
        self.traced.runs_python = left.runs_python
        for place, value in left.changed.items():
            self.variables[place].assign(value)
        keras_models.set_plain_attributes(self.model, left.attributes)
        if left.seeds is not None:
            generation().restore_seeds(left.seeds)


class _EvaluateCall(_Inference):
    """One call of `evaluate`."""

    method = "evaluate"
    hooks = frozenset({"on_test_batch_begin", "on_test_batch_end"})
    stop_flag = "stop_evaluating"

    def build(self) -> None:
        specs = inputs.without_lists(self.data.specs)
        rejections.refuse_data(self.model, specs, self.method)
        super().build()
        keras_metrics.build_metrics_for(self.model, "test_step", specs)
        keras_specs = self.data.keras_specs(self.data.train)
        rejections.refuse_weights(self.model, keras_specs, self.method)

    def on_begin(self) -> None:
        self.callbacks.list.on_test_begin()

    def order(self) -> orders.EvaluateOrder:
        return orders.EvaluateOrder(
            **self.common(), data=self.data.train, steps=self.arguments.steps_per_epoch
        )

    def end(self, results: list[orders.Evaluated]) -> Any:
        self.data.warn_of_pass()
        first = results[0]
        variables = keras_metrics.metric_variables(self.model)
        # Metrics may make variables in their first step, which this process does not run.
        if [tuple(v.shape) for v in variables] == [value.shape for value in first.metrics]:
            for variable, value in zip(variables, first.metrics, strict=True):
                variable.assign(value)
        self.take_over(first.left)
        self.callbacks.list.on_test_end(first.logs)
        return first.logs if self.return_dict else first.values


class _PredictCall(_Inference):
    """One call of `predict`."""

    method = "predict"
    hooks = frozenset({"on_predict_batch_begin", "on_predict_batch_end"})
    stop_flag = "stop_predicting"

    def build(self) -> None:
        rejections.refuse_data(self.model, self.data.batch_specs(), self.method)
        super().build()

    def first_step(self) -> tuple[Any, str]:
        return self.data.batch_specs(), self.method

    def divided(self, stream: Stream) -> Any:
        signature = stream.signature
        own_step = not keras_common.is_keras_own(type(self.model).predict_step)
        # Keras's own step takes only the inputs.
        return signature if own_step or not isinstance(signature, tuple) else signature[0]

    def begin(self) -> list[Block]:
        self.outputs = outputs.OutputReader(self.size)
        return super().begin()

    def on_begin(self) -> None:
        self.callbacks.list.on_predict_begin()

    def order(self) -> orders.PredictOrder:
        return orders.PredictOrder(
            **self.common(), data=self.data.train, steps=self.arguments.steps_per_epoch
        )

    def _on_outputs(self, rank: int, message: Delivery) -> None:
        said = message.message
        self.outputs.take(rank, said.structure, said.arrays, message.block)

    HANDLERS: ClassVar[Mapping[type, str]] = {**ModelCall.HANDLERS, Delivery: "_on_outputs"}

    def logs_at(self, waiting: messages.Waiting) -> Any:
        ends = waiting.hook == "on_predict_batch_end"
        return {"outputs": self.outputs.new()} if ends else None

    def fail(self) -> None:
        self.outputs.discard()

    def end(self, results: list[orders.Left]) -> Any:
        self.data.warn_of_pass()
        try:
            self.take_over(results[0])
            self.callbacks.list.on_predict_end()
            return self.outputs.all()
        finally:
            self.outputs.discard()
