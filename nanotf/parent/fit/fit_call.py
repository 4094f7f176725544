"""One call of `fit`, in the parent: sends the order, runs hooks, returns the state."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pickle
from typing import Any

import numpy as np

from nanotf.compat import (
    keras_callbacks,
    keras_compiling,
    keras_metrics,
    keras_models,
    keras_optimizers,
    keras_runs,
)
from nanotf.compat.eager_context import FirstUse
from nanotf.compat.generation import generation
from nanotf.console import logger
from nanotf.errors import WorkerDied, WorkerError, WorkerStuck
from nanotf.parent import calls, defaults, rejections, traced
from nanotf.parent.callbacks import ParentCallbacks, Unrecorded
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.model_call import ModelCall
from nanotf.parent.reading.fit_data import FitData
from nanotf.parent.reading.passes import Resume
from nanotf.parent.resume import checks
from nanotf.parent.resume.moments import Moment, read_all
from nanotf.parent.resume.resumption import Resumption
from nanotf.parent.resume.writer import CheckpointWriter
from nanotf.parent.where import Where
from nanotf.pool.plans import AnyPlan
from nanotf.region.sharded_update import OptimizerShards
from nanotf.shipping import orders
from nanotf.shipping.state import SharedVariables, StateLayout
from nanotf.wire import messages
from nanotf.wire.blocks import Block


@dataclasses.dataclass
class FitProgress:
    """The progress of a `fit`; workers that replace dead ones continue from it."""

    first: tuple[int, int] = (0, 0)  # the epoch and the step with which this call begins
    # Where the next workers begin; kept where restarts are allowed or checkpoints written.
    last: Moment | None = None
    continues: bool = False  # the next workers begin at `last`, not with the first step
    epoch: int = 0  # the present one
    has_begun: bool = False  # all callbacks have got the hook for the start of training
    has_ended: bool = False  # and for its end


@dataclasses.dataclass
class SentOrder:
    """The state of the workers that run the present order, as this process knows it."""

    turn: int = 0  # of the state that they stored last
    loaded: int = 0  # the turn that the user's model holds
    epoch_end: Unrecorded | None = None  # what the history lacks if this turn is the last
    attributes: bytes = b""  # pickled, those that they have: arrays cannot be compared
    seeds: Any = None  # the random state that they have
    asked: bool = False  # to pause


class FitCall(ModelCall):
    """One call of `fit`.

    After a restart `run` is called again. The callbacks stay as they are. They get no second
    `on_train_begin`, but all hooks of the incomplete epoch again, from `on_epoch_begin` on.
    """

    trains = True
    method = "fit"

    def __init__(
        self,
        model: Any,
        arguments: FitArguments,
        size: int,
        options: FitOptions,
    ) -> None:
        generation().check_compiled(model, "fit")
        super().__init__(model, arguments, size, options.sharding)
        self.metrics_layout = StateLayout.of(keras_metrics.metric_state(model), size)
        self.options, self.max_restarts = options, options.max_restarts
        self.resumption = None if options.resume is None else Resumption(options.resume, self)
        last = None if self.resumption is None else self.resumption.moment
        self.progress = FitProgress(last=last, continues=last is not None)
        self.sent = SentOrder()
        self.checkpoints: CheckpointWriter | None = None
        if self.resumption is not None:
            self.checkpoints = CheckpointWriter(self, self.resumption)

    def build(self) -> None:
        model, specs = self.model, self.data.specs
        if model.jit_compile and not self.quiet:
            rejections.warn_of_lengths(model, specs)
        rejections.refuse_data(model, specs, "fit")
        if self._counts_traces():
            keras_compiling.trace_step(model, "train_step", self.specs_by_step()["train"])
        super().build()
        rejections.refuse_optimizer(model, specs)
        # With the rows that Keras's step would know.
        keras_optimizers.build_for_training(model, self.data.keras_specs(self.data.train))
        self._refuse_weights_and_validation()

    def _counts_traces(self) -> bool:
        """Returns True if workers draw random numbers by how often Keras would have traced."""
        model = self.model
        counts = keras_compiling.counts_traces(model) and not model.run_eagerly
        return counts and not traced.is_traced(model, self.specs_by_step())

    def _refuse_weights_and_validation(self) -> None:
        model, data, a = self.model, self.data, self.arguments
        rejections.refuse_weights(model, data.keras_specs(data.train), "fit")
        if data.validation_specs is None and data.own_validation is None:
            return
        given = True if a.validation_data is None else a.validation_data
        generation().check_validation(model, given, a.validation_freq)
        if data.validation_specs is None:
            return
        rejections.refuse_data(model, data.validation_specs, "evaluate")
        rejections.refuse_weights(model, data.keras_specs(data.validation), "evaluate")

    def specs_by_step(self) -> dict[str, Any]:
        specs = super().specs_by_step()
        if self.data.validation is not None:
            specs["test"] = self.data.keras_specs(self.data.validation)
        return specs

    def dumped(self) -> tuple[bytes, list[Any]]:
        if not self._counts_traces():
            return super().dumped()
        with keras_compiling.before_last_trace(
            self.model, "train_step", self.specs_by_step()["train"]
        ):
            return super().dumped()

    def variables_to_send(self) -> list[Any]:
        return keras_optimizers.training_variables(self.model)

    def variables_apart(self) -> list[Any]:
        return keras_metrics.metric_state(self.model)

    def begin(self) -> list[Block]:
        self.sent = SentOrder()  # new workers have stored nothing
        is_first, begins_at = not self.progress.has_begun, self.options.begins_at
        if is_first:
            self._begin_training()
        is_handed_over = False
        if is_first and begins_at is not None:
            is_handed_over = True  # the model holds the values
            self.progress.last, self.progress.continues = Moment(begins_at, 0, []), True
        if self.progress.continues:
            self._begin_again(self.progress.last)
        # After `_begin_again`, which opens the data whose blocks these are.
        blocks = [*self.state_and_blocks(), Block(self.metrics_layout.nbytes)]
        self.metrics_block = len(blocks) - 1
        variables = keras_metrics.metric_state(self.model)
        self.metrics = SharedVariables(self.metrics_layout, blocks[self.metrics_block], variables)
        self.metrics.store(orders.FIRST_METRICS)  # of metrics that are never reset
        if is_handed_over or not self.progress.continues:
            self.state.store(self.sent.turn)
            if self.max_restarts > 0:
                epoch = self.progress.first[0] if begins_at is None else begins_at
                self.progress.last = Moment(epoch, 0, self.state.snapshot(self.sent.turn))
        elif self.progress.last is not None:
            self.state.restore(self.sent.turn, self.progress.last.values)
            if self.progress.last.step:
                self.metrics.restore(orders.FIRST_METRICS, self.progress.last.metrics)
        return blocks

    def _begin_training(self) -> None:
        a = self.arguments
        self.callbacks = ParentCallbacks(
            a.callbacks, self.model, a.verbose, a.epochs, self.data.steps
        )
        if self.data.own_validation is not None:
            self.callbacks.look_at_model = True  # `evaluate` runs here, with the workers' values
            keras_runs.forget_validation_data(self.model)
        self.model.stop_training = False
        self.callbacks.list.on_train_begin()
        self.progress.first = generation().place_to_resume(
            self.model, a.initial_epoch, self.data.steps
        )
        self.progress.has_begun = True
        if self.resumption is not None:
            self.progress.first = a.initial_epoch, 0
            self.resumption.begin(self.callbacks.list.callbacks)
            self.model.stop_training = self.resumption.stops
            self.callbacks.wait_at_validation()

    def _begin_again(self, last: Moment | None) -> None:
        """Prepares for new workers, which continue after the last completed epoch."""
        assert last is not None
        keras_callbacks.forget_open_evaluation(self.callbacks.list)
        if self.restarts > 0:
            states = self.data.random_states_of(last.epoch, self.progress.first[0])
        else:
            states = None if self.resumption is None else self.resumption.reading
        self.place_data(last, states)
        if self.restarts == 0 and self.resumption is not None:
            self.resumption.restore_random()

    def place_data(self, last: Moment, states: Any) -> None:
        """Opens the data again, at a moment.

        Args:
            states: see `Resume.random_states`.
        """
        seed = (self.resumption or self.data).order_seed
        self.data = FitData(
            self.model,
            self.arguments,
            calls.STATE_BLOCK + 1,
            self.options.sharding,
            resume=Resume(*self.progress.first, last.epoch, states, seed, last.step),
        )

    def run_on(self, where: Where, plan: AnyPlan) -> Any:
        try:
            return super().run_on(where, plan)
        except (WorkerDied, WorkerStuck) as error:
            if not self.progress.has_ended:
                raise
            # The training itself is complete.
            logger.warning("After the end of training: %s", error.message)
            return self.finish([], ())

    def can_restart(self) -> bool:
        return self.progress.last is not None and not self.progress.has_ended

    def prepare_restart(self, error: WorkerError) -> None:
        assert self.progress.last is not None, "`can_restart`"
        self.progress.continues = True
        if self.checkpoints is not None:
            self.checkpoints.sigterm.holds = False  # the last moment is on the disk
        place = self.progress.last.place(self.arguments.epochs, self.data.steps)
        self.tell_restart(error, f"Training continues at {place}")
        if self.restarts == 1:
            checks.warn_of_other_numbers(self.model, self.data)

    def order(self) -> orders.FitOrder:
        a = self.arguments
        attributes = keras_models.plain_attributes(self.model)
        self.sent.attributes = pickle.dumps(attributes)
        if self.traced.attributes is None:
            self.traced.attributes = copy.deepcopy(attributes)
        self.sent.seeds = generation().drawn_seeds()
        epochs, (epoch, step), stop = a.epochs, self.progress.first, bool(self.model.stop_training)
        passed_steps, passed_logs = 0, None
        if self.progress.continues and self.progress.last is not None:
            epoch, step = self.progress.last.epoch, 0
            passed_steps, passed_logs = self.progress.last.step, self.progress.last.logs
            if epoch > self.progress.first[0]:
                self.unreset = {}  # they were reset at the begin of the second epoch
            if stop:  # no further epoch, only Keras's work at the end of training
                epochs, stop = epoch, False
        return orders.FitOrder(
            **self.common(),
            train=self.data.train,
            validation=self.data.validation,
            epochs=epochs,
            initial_epoch=epoch,
            initial_step=step,
            passed_steps=passed_steps,
            passed_logs=passed_logs,
            steps_per_epoch=self.data.steps_per_epoch,
            validation_steps=self.data.validation_steps,
            validation_freq=a.validation_freq,
            shards=self._shards(),
            metrics_layout=self.metrics_layout,
            metrics_block=self.metrics_block,
            pauses=self.checkpoints is not None,
            stop=stop,
            attributes=attributes if self.model.run_eagerly else self.traced.attributes,
        )

    def _shards(self) -> OptimizerShards | None:
        if self.workers.transport != "shm":
            return None  # TensorFlow's own collectives have no such reduce-scatter
        return OptimizerShards.of(self.model, self.variables)

    def on_sent(self) -> None:
        self.state.reserve(self.sent.turn + 1)
        self.sent.asked = False
        if self.checkpoints is not None:
            workers = self.workers
            self.checkpoints.sigterm.wake = lambda: workers.post(messages.Woken())
            self.checkpoints.sigterm.holds = True

    def poll(self) -> None:
        """Acts on SIGTERM: a checkpoint of validation's start, or of the next step."""
        checkpoints = self.checkpoints
        if checkpoints is None or not checkpoints.sigterm.heard:
            return
        if checkpoints.taken is not None:
            checkpoints.write()
        elif not self.sent.asked:
            self.sent.asked = True
            self.workers.send(messages.Pause(self.number))

    # ----------------------------------------------------------------------------- hooks
    def on_event(self, rank: int, message: messages.Event) -> None:
        super().on_event(rank, message)
        if self._is_over(message.hook):
            return
        if message.hook == "on_epoch_begin":
            self._begin_epoch(message.index)
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

    def reply(self, first: messages.Waiting) -> messages.Proceed:
        """Calls the hook that all ranks have reached."""
        if first.hook == orders.PAUSE:
            return self._pause(first)
        self._note(first)
        home = FirstUse(functools.partial(self._bring_home, first))
        is_end = first.hook == "on_train_end"
        look = self.callbacks.look_at_model
        if look or is_end:
            self.metrics.load(orders.METRICS)
        logs = first.logs
        if first.hook == "on_test_begin":
            self._begin_validation(logs)
            logs = None
        elif first.hook in orders.BATCH_HOOKS:
            logs = keras_metrics.all_logs(self.model, logs)
        elif is_end and logs is None and self.progress.last is not None:
            logs = self.progress.last.logs  # no epoch was left to run after a restart
        with home.awaited() if look or is_end else contextlib.nullcontext():
            if self._validates_here(first):
                # As in Keras, an epoch whose validation raises is not recorded.
                ended, self.sent.epoch_end = self.sent.epoch_end, None
                logs = {**(logs or {}), **self._own_validation()}
                self.sent.epoch_end = ended and dataclasses.replace(ended, logs=logs)
            self.callbacks.call(first.hook, first.index, logs)
            if is_end:
                home.note()  # the result, even if no callback has looked at the model
        if first.hook == "on_epoch_begin":
            self._begin_epoch(first.index)
        self._tell_data(first.hook, first.index)
        answer = self._changes(home.has_acted, may_reload=look and not is_end)
        self.progress.has_ended = is_end
        if first.hook == "on_epoch_end" and first.index is not None and self._keeps_moments():
            self.progress.last = Moment(
                first.index + 1, 0, self.state.snapshot(self.sent.turn), logs=logs
            )
            self._take(self.progress.last)
        elif self.progress.has_ended and self.checkpoints is not None:
            self._take(self.moment_at_end(logs))
        return answer

    def on_replied(self) -> None:
        """Writes the checkpoint of an epoch's end; the workers train on meanwhile."""
        if self.checkpoints is not None and self.checkpoints.is_due:
            self.checkpoints.write()

    def _note(self, first: messages.Waiting) -> None:
        """Notes what the workers have stored, and what has changed there beside their variables."""
        if first.attributes:
            keras_models.set_plain_attributes(self.model, first.attributes)
            self.sent.attributes = pickle.dumps(keras_models.plain_attributes(self.model))
        if not first.state:
            return
        if first.hook == "on_epoch_end":
            recorded = self.callbacks.recorded()
            self.sent.epoch_end = Unrecorded(
                self.sent.turn + 1, first.index, first.logs or {}, recorded
            )
        self.sent.turn += 1  # from here on the epoch is complete, see `fail`
        if first.seeds is not None:
            generation().restore_seeds(first.seeds)
            self.sent.seeds = first.seeds

    def _bring_home(self, first: messages.Waiting) -> None:
        """Gives the user's model the workers' state, which they store at batches only for this."""
        if not first.state and first.hook in orders.BATCH_HOOKS:
            self._note(self.with_state())
        self.state.load(self.sent.turn)
        self.sent.loaded = self.sent.turn

    def _validates_here(self, first: messages.Waiting) -> bool:
        """Returns True if this process validates the epoch that has ended."""
        if first.hook != "on_epoch_end" or self.data.own_validation is None:
            return False
        return keras_runs.is_validated(self.model, first.index, self.arguments.validation_freq)

    def _own_validation(self) -> dict[str, Any]:
        """Calls the model's own `evaluate` on the validation data, as Keras's `fit` does."""
        data, a = self.data.own_validation, self.arguments
        batch_size = a.validation_batch_size or a.batch_size
        with defaults.no_default():
            steps, callbacks = a.validation_steps, self.callbacks.list
            logs = keras_runs.validate(self.model, data, batch_size, steps, callbacks)
        return {f"val_{name}": value for name, value in logs.items()}

    def _changes(self, is_home: bool, may_reload: bool) -> messages.Proceed:
        """Returns the callbacks' changes, which the workers then apply.

        Args:
            is_home: whether the user's model has had the workers' state.
            may_reload: whether the workers need new values of variables.
        """
        reload = reload_metrics = has_drawn = False
        written: messages.Written = ()
        attributes: tuple[dict[str, Any], ...] = ()
        if is_home and may_reload:
            reload = self.state.differs(self.sent.turn)
            if reload:
                self.state.store(self.sent.turn)
                written = messages.written(calls.STATE_BLOCK, self.state.spans(self.sent.turn))
            # A callback that evaluates the model leaves its own numbers in the metrics.
            reload_metrics = reload or self.metrics.differs(orders.METRICS)
            if reload_metrics:
                self.metrics.store(orders.METRICS)
                written += messages.written(self.metrics_block, self.metrics.spans(orders.METRICS))
        if self.callbacks.look_at_model:
            found = keras_models.plain_attributes(self.model)
            pickled = pickle.dumps(found)
            if pickled != self.sent.attributes:
                self.sent.attributes, attributes = pickled, found
        if is_home:
            seeds = generation().drawn_seeds()
            has_drawn = not np.array_equal(seeds, self.sent.seeds)
            self.sent.seeds = seeds
        return messages.Proceed(
            self.number,
            stop=bool(self.model.stop_training),
            attributes=attributes,
            seeds=self.sent.seeds if has_drawn else None,
            reload=reload,
            reload_metrics=reload_metrics,
            written=written,
        )

    # ----------------------------------------------------------------------- checkpoints
    def _keeps_moments(self) -> bool:
        return self.max_restarts > 0 or self.resumption is not None

    def moment_at_end(self, logs: Any) -> Moment:
        """Returns the moment after all callbacks' `on_train_end`."""
        epoch = self.progress.first[0] if self.progress.last is None else self.progress.last.epoch
        return Moment(epoch, 0, read_all(self.variables), logs=logs)

    def _take(self, moment: Moment, is_due: bool = True) -> None:
        if self.checkpoints is not None:
            self.checkpoints.take(moment, is_due)

    def _begin_epoch(self, epoch: int | None) -> None:
        """Restores what callbacks have changed at the beginning of an epoch that had begun."""
        self.progress.epoch = epoch or 0
        last = self.progress.last
        if self.progress.continues and last is not None and last.step and last.epoch == epoch:
            self.state.restore(self.sent.turn, last.values)
            if self.resumption is not None:
                self.resumption.restore_callbacks()

    def _moment_within(self, step: int, logs: Any) -> Moment:
        """Returns the moment after a step whose state the workers have stored."""
        steps = step if self.data.steps is None else min(step, self.data.steps)
        values = self.state.snapshot(self.sent.turn)
        return Moment(
            self.progress.epoch, steps, values, self.metrics.snapshot(orders.METRICS), logs
        )

    def _begin_validation(self, logs: Any) -> None:
        """Takes a checkpoint for SIGTERM during validation; a resumed `fit` validates again."""
        if self.checkpoints is None or self.data.steps is None or self.model.stop_training:
            return
        self._take(self._moment_within(self.data.steps, logs), is_due=False)

    def _pause(self, first: messages.Waiting) -> messages.Proceed:
        """Writes a checkpoint while the workers wait after a step."""
        self.sent.turn += 1
        self.sent.asked = False
        self.progress.last = self._moment_within(first.index or 0, first.logs)
        self._take(self.progress.last)
        return messages.Proceed(self.number)

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which training runs, see `Checkpointing`."""
        return contextlib.nullcontext() if self.checkpoints is None else self.checkpoints

    @property
    def is_finished(self) -> bool:
        """True if a checkpoint holds the end of this training."""
        return self.resumption is not None and self.resumption.is_finished

    # ------------------------------------------------------------------------------- end
    def fail(self) -> None:
        if (
            self.sent.turn != self.sent.loaded
        ):  # the model gets the state after the last completed epoch
            self.state.load(self.sent.turn)
        end = self.sent.epoch_end
        if end is not None and end.turn == self.sent.turn:  # and its history records that epoch
            self.callbacks.record(end.epoch, end.logs, end.recorded)

    def release(self) -> None:
        super().release()
        del self.metrics

    def end(self, results: list[Any]) -> Any:
        keras_runs.forget_validation_data(self.model)
        if results:
            self.traced.runs_python = results[0]
        return self.model.history

    def reported(self) -> None:
        self.model.history.nanotf = self.report
