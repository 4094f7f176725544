"""`fit(num_processes=...)` in the parent: a job from the call to the `History`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanotf import calls, gpu, jobs, messages, warm
from nanotf.callbacks import ParentCallbacks
from nanotf.compat import keras_names
from nanotf.errors import ModelError
from nanotf.fit_data import FitArguments
from nanotf.shipping import inputs
from nanotf.shipping.blocks import Block
from nanotf.transports import check_transport


def fit(
    model: Any,
    given: Mapping[str, Any],
    num_processes: int,
    transport: str | None = None,
    cores_per_process: int | None = None,
) -> Any:
    """Trains a model on `num_processes` workers.

    Args:
        model: a compiled Keras model.
        given: mapping of str to object, the arguments of Keras's `fit` that were given.
        num_processes: int, above 1.
        transport: str or None for the default, one of `transports.TRANSPORTS`.
        cores_per_process: int or None for equal shares of all usable cores.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError, PlacementError, ModelError,
        ShippingError: Something given cannot be used. No process was started.
        WorkerError: A worker raised or died.
    """
    plan = calls.plan_for("fit", num_processes, cores_per_process)
    call = _FitCall(model, FitArguments.of(given), num_processes)
    if plan is None:
        return gpu.fit(model, call.recipe, given, num_processes, gpu.devices())
    with warm.pool_for(plan, check_transport(transport)) as workers:
        return call.run(workers)


class _FitCall(calls.ModelCall):
    """One call of `fit`."""

    trains = True

    def __init__(self, model: Any, arguments: FitArguments, size: int) -> None:
        if not keras_names.is_compiled(model):
            # Keras's own words, so that programs that match them go on working.
            raise ModelError(
                "You must call `compile()` before calling `fit()`. Received: a model that is not "
                "compiled. Call model.compile(optimizer=..., loss=...) first."
            )
        super().__init__(model, arguments, size)
        self.turn = 0

    def build(self) -> None:
        super().build()
        keras_names.build_for_training(self.model, self.data.specs)

    def variables_to_send(self) -> list[Any]:
        return keras_names.training_variables(self.model)

    @property
    def steps(self) -> int | None:
        """Batches per epoch, where that is known."""
        return self.arguments.steps_per_epoch or self.data.train.steps

    def begin(self) -> list[Block]:
        a = self.arguments
        blocks = self.state_and_blocks()
        self.callbacks = ParentCallbacks(a.callbacks, self.model, a.verbose, a.epochs, self.steps)
        self.model.stop_training = False
        self.callbacks.list.on_train_begin()
        self.state.store(self.turn)
        return blocks

    def job(self) -> jobs.FitJob:
        a = self.arguments
        # An endless dataset with known steps lets Keras keep one iterator over all epochs.
        validation_steps = a.validation_steps
        if validation_steps is None and isinstance(self.data.validation, inputs.ArrayInput):
            validation_steps = self.data.validation.steps
        steps = a.steps_per_epoch
        if steps is None and isinstance(self.data.train, inputs.ArrayInput):
            steps = self.data.train.steps
        return jobs.FitJob(
            **self.common(),
            train=self.data.train,
            validation=self.data.validation,
            epochs=a.epochs,
            initial_epoch=a.initial_epoch,
            steps_per_epoch=steps,
            validation_steps=validation_steps,
            validation_freq=a.validation_freq,
        )

    def answer(self, first: messages.Waiting) -> messages.Proceed:
        """Calls the hook that all ranks have reached, and lets them go on."""
        if first.state:
            self.turn += 1
            self.state.combine(self.turn)
        if first.hook == "on_train_end" or (first.state and self.callbacks.look_at_model):
            self.state.load(self.turn)
        self.callbacks.call(first.hook, first.index, first.logs)
        reload = False
        if first.state and self.callbacks.look_at_model:
            reload = self.state.differs(self.turn)
            if reload:
                self.state.store(self.turn)
        return messages.Proceed(self.number, stop=bool(self.model.stop_training), reload=reload)

    def fail(self) -> None:
        if self.turn > 0:  # the model gets what the last completed epoch left
            self.state.load(self.turn)

    def end(self, results: list[Any]) -> Any:
        return self.model.history
