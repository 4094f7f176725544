"""Runs `fit(num_processes=...)` in the parent: sends the job, runs hooks, returns the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import (
    keras_callbacks,
    keras_names,
    keras_optimizers,
)
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, ModelError, WorkerDied, WorkerError, WorkerStuck
from nanotf.parent import calls, gpu, rejections
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.parent.fit_data import FitArguments, FitData, Resume
from nanotf.parent.model_call import ModelCall
from nanotf.pool import warm
from nanotf.pool.transports import check_transport
from nanotf.region.sharded_update import OptimizerShards
from nanotf.shipping import jobs, optimizers
from nanotf.shipping.pipelines import check_sharding
from nanotf.shipping.state import State, StateLayout
from nanotf.wire import messages
from nanotf.wire.blocks import Block


def fit(
    model: Any,
    given: Mapping[str, Any],
    num_processes: int,
    transport: str | None = None,
    cores_per_process: int | None = None,
    sharding: str | None = None,
    max_restarts: int = 0,
    cores: Sequence[int] | None = None,
    backend: str | None = None,
    avoid: Collection[int] = (),
) -> Any:
    """Trains a model on `num_processes` workers.

    Args:
        model: a compiled Keras model.
        given: mapping of str to object, the arguments of Keras's `fit` that were given.
        num_processes: int, above 1.
        transport: str or None for the default, one of `transports.TRANSPORTS`.
        cores_per_process: int or None for equal shares of all usable cores.
        sharding: str or None for "auto", one of `shipping.pipelines.SHARDINGS`.
        max_restarts: int, how often training continues, from the last completed epoch and with new
            workers, after a worker died or got stuck.
        cores: sequence of int or None, the logical CPUs to share out between the workers.
        backend: str or None for the default, one of `backends.BACKENDS`.
        avoid: collection of int, the logical CPUs of this process's readers.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError, PlacementError, ModelError,
        ShippingError: An argument cannot be used. No process was started.
        WorkerError: A worker raised or died.
    """
    plan = calls.plan_for("fit", num_processes, cores_per_process, cores, backend, avoid)
    _check_steps_per_execution(model, check_transport(transport))
    call = _FitCall(
        model, FitArguments.of(given), num_processes, check_sharding(sharding), max_restarts
    )
    if plan is None:
        return gpu.fit(call, given, num_processes, gpu.devices())
    while True:
        try:
            with warm.pool_for(plan, check_transport(transport)) as workers:
                return call.run(workers)
        except (WorkerDied, WorkerStuck) as error:
            if call.has_ended:  # the training itself is complete
                logger.warning("After the end of training: %s", error.message)
                return call.finish([], ())
            call.prepare_restart(error)


def _warn_of_lengths(model: Any, specs: Any) -> None:
    """Warns of data for which XLA compiles the same step again and again."""
    shapes = [leaf.shape for leaf in require_tensorflow().nest.flatten(specs)]
    varying = [shape for shape in shapes if shape.rank and None in shape[1:].as_list()]
    if varying:
        logger.warning(
            "XLA compiles a step anew for each shape of its batches, and those of the model %r, "
            "compiled with jit_compile=True, have dimensions that vary: %s. Pad all to one "
            "length, for instance by a tokenizer's padding='max_length' or by padded_shapes of "
            "`padded_batch`.",
            model.name,
            varying[0],
        )


@dataclasses.dataclass
class _EpochEnd:
    """State after the last completed epoch, or at the start of training.

    Args:
        next_epoch: int.
        state: array of bytes, see `State.snapshot`.
        logs: the logs passed to `on_epoch_end`.
    """

    next_epoch: int
    state: np.ndarray[Any, Any]
    logs: Any = None


@dataclasses.dataclass(frozen=True)
class _Unrecorded:
    """A completed epoch that `History` may not have recorded yet: `History` is the last callback.

    Args:
        turn: int, the turn of the state block with the state after the epoch.
        epoch: int.
        logs: the logs for `on_epoch_end`.
        recorded: the result of `ParentCallbacks.recorded` before the epoch's end.
    """

    turn: int
    epoch: int | None
    logs: Any
    recorded: list[dict[str, int]]


def _check_steps_per_execution(model: Any, transport: str) -> None:
    """Rejects arguments for which TensorFlow's collectives would get no keys in a graph."""
    if transport == "grpc" and generation().is_compiled(model):
        steps = int(model.steps_per_execution) if generation().steps_at_once(model) > 1 else 1
        if steps > 1:
            raise InvalidArgumentError(
                "TensorFlow's collectives do not work inside the loop that makes several steps one "
                f"execution. Received: transport='grpc' and steps_per_execution={steps}. Use "
                "transport='shm', or compile(steps_per_execution=1)."
            )


class _FitCall(ModelCall):
    """One call of `fit`.

    After a restart `run` is called again. The callbacks stay as they are. They get no second
    `on_train_begin`, but all hooks of the incomplete epoch again, from `on_epoch_begin` on.
    """

    trains = True
    method = "fit"

    def __init__(
        self, model: Any, arguments: FitArguments, size: int, sharding: str, max_restarts: int
    ) -> None:
        generation().check_compiled(model, "fit")
        super().__init__(model, arguments, size, sharding)
        self.metrics_layout = StateLayout.of(keras_names.metric_state(model), size)
        self.turn = 0
        self.loaded = 0  # the turn that the user's model holds
        self.epoch_end: _Unrecorded | None = None
        self.sharding = sharding
        self.restarts = 0
        self.max_restarts = max_restarts
        self.last_epoch: _EpochEnd | None = None  # kept where restarts are allowed
        self.has_ended = False  # whether all callbacks got the hook for the end of training

    def build(self) -> None:
        model, specs = self.model, self.data.specs
        if model.jit_compile and not self.quiet:
            _warn_of_lengths(model, specs)
        rejections.refuse_data(model, specs, "fit")
        super().build()
        self._check_optimizer()
        keras_optimizers.build_for_training(model, specs)
        rejections.refuse_weights(model, self.data.keras_specs(self.data.train), "fit")
        validation = self.data.validation_specs
        if validation is not None:
            a = self.arguments
            given = True if a.validation_data is None else a.validation_data
            generation().check_validation(model, given, a.validation_freq)
            rejections.refuse_data(model, validation, "evaluate")
            rejections.refuse_weights(
                model, self.data.keras_specs(self.data.validation), "evaluate"
            )

    def _check_optimizer(self) -> None:
        """Rejects an optimizer whose slots do not match the trainable variables.

        Keras raises, or continues as if nothing had changed, depending on its earlier traces.
        """
        model, optimizer = self.model, self.model.optimizer
        own_step = not keras_names.is_keras_own(type(model).train_step)
        if own_step or keras_optimizers.is_built_for(optimizer, model.trainable_variables):
            return
        rejections.trace_step(model, self.data.specs)
        raise ModelError(
            "An optimizer must have been built for the trainable variables. Received: "
            f"model {model.name!r} with {len(model.trainable_variables)} trainable variables, and "
            f"an optimizer {type(optimizer).__name__} of others. Call compile(), with a new "
            "optimizer, after a change of `trainable` or of the layers."
        )

    def variables_to_send(self) -> list[Any]:
        return keras_optimizers.training_variables(self.model)

    def variables_apart(self) -> list[Any]:
        return keras_names.metric_state(self.model)

    def begin(self) -> list[Block]:
        if self.last_epoch is None:
            self._begin_training()
        else:
            self._begin_again(self.last_epoch)
        blocks = [*self.state_and_blocks(), Block(self.metrics_layout.nbytes)]
        self.metrics_block = len(blocks) - 1
        variables = keras_names.metric_state(self.model)
        self.metrics = State(self.metrics_layout, blocks[self.metrics_block], variables)
        self.metrics.store(0)  # of metrics that are never reset
        if self.last_epoch is None:
            self.state.store(self.turn)
            if self.max_restarts > 0:
                self.last_epoch = _EpochEnd(self.first[0], self.state.snapshot(self.turn))
        else:
            self.state.restore(self.turn, self.last_epoch.state)
        return blocks

    def _begin_training(self) -> None:
        a = self.arguments
        self.callbacks = ParentCallbacks(
            a.callbacks, self.model, a.verbose, a.epochs, self.data.steps
        )
        self.model.stop_training = False
        self.callbacks.list.on_train_begin()
        self.first = generation().place_to_resume(self.model, a.initial_epoch, self.data.steps)

    def _begin_again(self, last: _EpochEnd) -> None:
        """Prepares for new workers, which continue after the last completed epoch."""
        keras_callbacks.forget_open_evaluation(self.callbacks.list)
        if self.restarts > 0:
            states = self.data.random_states_of(last.next_epoch, self.first[0])
            self.data = FitData(
                self.model,
                self.arguments,
                self.seed,
                calls.STATE_BLOCK + 1,
                self.sharding,
                resume=Resume(*self.first, last.next_epoch, states),
            )
        self.turn = self.loaded = 0  # the turns of a new job
        self.epoch_end = None

    def prepare_restart(self, error: WorkerError) -> None:
        """Logs that training continues after an error, or raises the error."""
        if self.last_epoch is None or self.restarts >= self.max_restarts:
            raise error
        self.restarts += 1
        logger.warning(
            "%s Training continues with epoch %d of %d and new workers: restart %d of %d.",
            error.what,
            self.last_epoch.next_epoch + 1,
            self.arguments.epochs,
            self.restarts,
            self.max_restarts,
        )

    def job(self) -> jobs.FitJob:
        a = self.arguments
        epochs, (epoch, step), stop = a.epochs, self.first, bool(self.model.stop_training)
        if self.restarts > 0 and self.last_epoch is not None:
            epoch, step = self.last_epoch.next_epoch, 0
            if stop:  # no further epoch, only Keras's work at the end of training
                epochs, stop = epoch, False
        return jobs.FitJob(
            **self.common(),
            train=self.data.train,
            validation=self.data.validation,
            epochs=epochs,
            initial_epoch=epoch,
            initial_step=step,
            steps_per_epoch=self.data.steps_per_epoch,
            validation_steps=self.data.validation_steps,
            validation_freq=a.validation_freq,
            shards=self._shards(),
            optimizers=optimizers.built_optimizers(self.numbered),
            asks=self.callbacks.asks,
            metrics_layout=self.metrics_layout,
            metrics_block=self.metrics_block,
            stop=stop,
        )

    def _shards(self) -> OptimizerShards | None:
        if self.workers.transport != "shm":
            return None  # TensorFlow's own collectives have no such reduce-scatter
        return OptimizerShards.of(self.model, self.variables)

    def sent(self) -> None:
        self.state.reserve(self.turn + 1)

    # ----------------------------------------------------------------------------- hooks
    def hear(self, message: Any) -> None:
        super().hear(message)
        self._tell_data(message.hook, message.index)

    def _tell_data(self, hook: str, index: int | None) -> None:
        """Notifies the data's readers of the progress of training."""
        if hook == "on_epoch_begin" and index is not None:
            self.data.warn_of_epoch(index)
        for writer in self.writers:
            if hook == "on_epoch_begin":
                writer.begin_epoch()
            elif hook == "on_epoch_end" and not self.model.stop_training:
                writer.end_epoch()
            elif hook == "on_train_end":
                writer.finish()

    def answer(self, first: messages.Waiting) -> messages.Proceed:
        """Calls the hook that all ranks have reached."""
        if not first.state and self.callbacks.needs_state(first.hook, first.index):
            # They must report this hook again, with their state.
            return messages.Proceed(self.number, store=True)
        self._bring_home(first)
        logs = first.logs
        if first.hook in jobs.BATCH_HOOKS:
            logs = keras_names.all_logs(self.model, logs)
        elif first.hook == "on_train_end" and logs is None and self.last_epoch is not None:
            logs = self.last_epoch.logs  # no epoch was left to run after a restart
        self.callbacks.call(first.hook, first.index, logs)
        self._tell_data(first.hook, first.index)
        answer = self._changes(first)
        self.has_ended = first.hook == "on_train_end"
        if first.hook == "on_epoch_end" and first.index is not None and self.max_restarts > 0:
            self.last_epoch = _EpochEnd(first.index + 1, self.state.snapshot(self.turn), logs)
        return answer

    def _bring_home(self, first: messages.Waiting) -> None:
        """Gives the user's model the state that a hook needs."""
        look = self.callbacks.look_at_model
        at_end = first.hook == "on_train_end"
        if first.state:
            if first.hook == "on_epoch_end":
                recorded = self.callbacks.recorded()
                self.epoch_end = _Unrecorded(self.turn + 1, first.index, first.logs or {}, recorded)
            self.turn += 1  # from here on the epoch is complete, see `fail`
        if at_end or (first.state and look):
            self.state.load(self.turn)
            self.loaded = self.turn
        if look or at_end:
            self.metrics.load(0)

    def _changes(self, first: messages.Waiting) -> messages.Proceed:
        """Returns the callbacks' changes, which the workers then apply."""
        reload = reload_metrics = False
        written: messages.Written = ()
        if first.state and self.callbacks.look_at_model:
            reload = self.state.differs(self.turn)
            if reload:
                self.state.store(self.turn)
                written = messages.written(calls.STATE_BLOCK, self.state.spans(self.turn))
            # A callback that evaluates the model leaves its own numbers in the metrics.
            reload_metrics = reload or self.metrics.differs(0)
            if reload_metrics:
                self.metrics.store(0)
                written += messages.written(self.metrics_block, self.metrics.spans(0))
        return messages.Proceed(
            self.number,
            stop=bool(self.model.stop_training),
            reload=reload,
            reload_metrics=reload_metrics,
            written=written,
        )

    # ------------------------------------------------------------------------------- end
    def fail(self) -> None:
        if self.turn != self.loaded:  # the model gets the state after the last completed epoch
            self.state.load(self.turn)
        end = self.epoch_end
        if end is not None and end.turn == self.turn:  # and its history records that epoch
            self.callbacks.record(end.epoch, end.logs, end.recorded)

    def release(self) -> None:
        super().release()
        del self.metrics

    def end(self, results: list[Any]) -> Any:
        return self.model.history

    def reported(self) -> None:
        self.model.history.nanotf = self.report
