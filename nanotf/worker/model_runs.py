"""Runs one `fit`, `evaluate` or `predict` in one worker, by Keras, with the parent's answers."""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from nanotf.compat import (
    distribute,
    keras_common,
    keras_metrics,
    keras_models,
    keras_optimizers,
    keras_runs,
    keras_steps,
    random_states,
)
from nanotf.compat.generation import generation
from nanotf.compat.values import plain_logs, write
from nanotf.region import scope
from nanotf.region.replica_check import ReplicaCheck
from nanotf.shipping import orders, state, summaries
from nanotf.shipping.data import inputs, outputs, pipelines, streams
from nanotf.wire import messages, timing
from nanotf.wire.blocks import Block
from nanotf.wire.parts import Part
from nanotf.worker import output, replica
from nanotf.worker.pause_vote import PauseVote
from nanotf.worker.process import leaving_sigterm_to_parent

PROGRESS_SECONDS = 0.05  # Keras's own progress bar redraws no faster


class Abandoned(Exception):
    """Ends the call on all ranks, because the user's data raised in the parent."""


@functools.cache
def _reporter_class(hooks: frozenset[str]) -> Any:
    """Makes a callback class with these hooks only: Keras skips work for hooks that none has.

    Orders share the class. TensorFlow never frees the first 1024 classes whose objects it gets (the
    type cache in `tensorflow/python/util/util.cc`), nor anything that they refer to.
    """

    def calling(name: str) -> Any:
        def hook(self: Any, *arguments: Any, **named: Any) -> None:
            self.on_hook(name, *arguments, **named)

        return hook

    return type("Reporter", (tf.keras.callbacks.Callback,), {name: calling(name) for name in hooks})


class _ModelRun:
    """One call of a model's method in one worker.

    Args:
        number: int, the number of the call.
        order: a `orders.ModelOrder`.
        blocks: list of `Block`, the shared memory of the call.
    """

    order: Any
    stop_flag: str  # the attribute of a model that a callback sets to stop the run
    own_hooks: frozenset[str] = frozenset()  # hooks that the run needs itself
    written: messages.Written = ()  # see `messages.OrderDone`
    parts: tuple[Part, ...] = ()  # the same

    def __init__(
        self, session: Any, inbox: Any, number: int, order: Any, blocks: list[Block]
    ) -> None:
        self.session = session
        self.inbox = inbox
        self.number = number
        self.order = order
        self.blocks = blocks
        self._last_progress = 0.0  # `time.monotonic()` of the last batch event that was sent
        self._held: dict[str, tuple[int | None, Any]] = {}  # events of the last batch
        self.reader = session.reader
        self._attributes = b""  # pickled, the model's plain ones when last looked at
        self._refused: dict[int, Exception] = {}  # by source, the error of its last batch

    def run(self) -> Any:
        """Does the call; returns its result, see `orders`."""
        with distribute.single_process():
            return self._run()

    def _run(self) -> Any:
        raise NotImplementedError

    def _take_model(self, variables_of: Any, **parts: Any) -> None:
        """Sets `model` and `state`, with the parent's random numbers and values.

        Args:
            variables_of: callable that takes the model and returns the variables of `state`.
            **parts: of `Session.model`.
        """
        order, session = self.order, self.session
        self._restore_random_states()
        session.follow_seed(order)
        kept = session.model(order.heap, order.trace, order.specs, **parts)
        self._restore_random_states()  # making a model draws
        self.model, self.kept = kept.model, kept
        # Variables that this worker holds whole and, with a divided update, parts of others.
        variables = [*variables_of(self.model), *(kept.numbered[n] for n in order.captured)]
        held: list[state.VectorPart] = []
        lent = variables
        if isinstance(order, orders.FitOrder):  # which writes the block after each epoch
            update = kept.update
            held = [] if update is None else [state.VectorPart(*p) for p in update.variables()]
            lent = [] if update is None else update.divided
        self.state = state.SharedVariables(
            order.layout, self.blocks[order.state_block], variables, held, set(map(id, lent))
        )
        self.state.load(0)
        self._note_attributes()
        session.stopwatch.ready()

    def _restore_random_states(self) -> None:
        random_states.restore(self.order.chance.states)
        generation().restore_seeds(self.order.chance.keras)

    def _dataset(self, source: Any) -> Any:
        rank, size = self.session.rank, self.session.strategy.size
        if isinstance(source, streams.StreamInput):
            return source.dataset(self.reader, rank, size)
        if isinstance(source, pipelines.PipelineInput):
            refuse = functools.partial(self._refused.__setitem__, id(source))
            return source.dataset(rank, size, refuse)
        drawn = None
        if source.order is not None:
            read = self.reader.iterate(source.order, None, size, copies=False)
            drawn = (order for (order,), _ in read)
        return source.dataset(self.blocks, drawn, rank, size)

    @contextlib.contextmanager
    def _dividing(self) -> Iterator[None]:
        """Divides calls of layers, and relays the steps' prints to the user, in this context.

        Relays warnings, but not the error stream: the parent does not repeat a warning that its
        own Keras has given.
        """
        order, session = self.order, self.session
        prints = output.to_parent(session, self.number, order.terminal, ("stdout",), order.quiet)
        tell = session.channel.send if session.rank == 0 else lambda _: None
        counters = keras_runs.counters_of_steps(self.model)
        sender = summaries.Sender(self.number, tell, lambda: session.stopwatch.kind, counters)
        written = summaries.sending(sender, order.summaries)
        warned: Any = contextlib.nullcontext()
        if not order.quiet:
            warned = output.warning_parent(session, self.number, replica.is_in_step)
        held = keras_steps.letting_go(self.model)  # by the functions of a class of nanotf's
        with held, prints, warned, written, scope.dividing(session.strategy, self.kept.ledger):
            yield
        self.parts = self.kept.ledger.parts

    def _end_if_broken(self, source: Any) -> None:
        """Abandons the call if its data ended because they raised or were refused."""
        stream = getattr(source, "stream", getattr(source, "order", None))
        if stream is not None and self.reader.is_broken(stream):
            raise Abandoned
        error = self._refused.get(id(source))
        if error is not None:
            if self.session.rank == 0:
                self.session.channel.send(messages.DataFailed(self.number, None, error))
            raise Abandoned

    def _left(self, method: str) -> orders.Left:
        """Returns what a pass over the data leaves in the model; only rank 0's is used."""
        steps = keras_runs.step_count(self.model, method)
        if self.session.rank:
            return orders.Left(steps, {})
        return orders.Left(
            steps,
            self.state.changed(0),
            self._changed_attributes(),
            generation().drawn_seeds(),
            self.model._nanotf_runs_python,
        )

    def _changed_attributes(self) -> tuple[dict[str, Any], ...]:
        """Returns the model's plain attributes if steps that run eagerly have changed any.

        In a graph their code runs when it is traced, as often as the parent's own.
        """
        if not self.model.run_eagerly:
            return ()
        found = keras_models.plain_attributes(self.model)
        before, self._attributes = self._attributes, pickle.dumps(found)
        return found if self._attributes != before else ()

    def _note_attributes(self) -> None:
        self._attributes = pickle.dumps(keras_models.plain_attributes(self.model))

    def _callbacks(self) -> list[Any]:
        passes = self.session.stopwatch.callback(tf.keras.callbacks.Callback)
        return [passes, self._reporter()]

    def _reporter(self) -> Any:
        """Returns a Keras callback with only the hooks that the parent or this run needs."""
        reporter = _reporter_class(self.own_hooks | self.order.events | self.order.waits)()
        reporter.on_hook = lambda name, *arguments, **named: self._on_hook(
            name, *orders.index_and_logs(name, *arguments, **named)
        )
        return reporter

    def _on_hook(self, name: str, index: int | None, logs: Any) -> None:
        """Handles a call of one of Keras's hooks."""
        if name not in orders.BATCH_HOOKS:
            self._send_held()
        if name in self.order.waits:
            with self.session.stopwatch.hook():
                self._wait(name, index, plain_logs(logs))
        elif self.session.rank == 0 and name in self.order.events:
            self._report(name, index, logs)

    def _report(self, name: str, index: int | None, logs: Any) -> None:
        """Sends an event; batch events only as often as a progress bar redraws, and the last."""
        if name not in orders.BATCH_HOOKS:
            self._send(name, index, logs)
            return
        self._held[name] = (index, logs)
        if self._is_ahead():  # the logs belong to a later batch
            return
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self._send_held()

    def _is_ahead(self) -> bool:
        """Returns True if batches after this one were trained on already."""
        return False

    def _send_held(self) -> None:
        for name, (index, logs) in self._held.items():
            self._send(name, index, logs)
        self._held.clear()

    def _send(self, name: str, index: int | None, logs: Any) -> None:
        self.session.channel.send(messages.Event(self.number, name, index, plain_logs(logs)))

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        self._ask(name, index, logs)

    def _ask(
        self, name: str, index: int | None, logs: messages.Logs | None, **more: Any
    ) -> messages.Proceed:
        """Waits until all ranks have reached this hook and the parent answers.

        Args:
            more: further fields of `messages.Waiting`.
        """
        own = logs if self.session.rank == 0 else None
        self.session.channel.send(messages.Waiting(self.number, name, index, own, **more))
        answer: messages.Proceed = self.inbox.answer()
        if answer.abandon:
            raise Abandoned
        if answer.stop:
            setattr(self.model, self.stop_flag, True)
        return answer


class FitRun(_ModelRun):
    """One `fit` in one worker."""

    order: orders.FitOrder
    stop_flag = "stop_training"
    own_hooks = frozenset({"on_train_begin", "on_epoch_begin"})

    def _run(self) -> bool:
        order = self.order
        self.turn = 0
        self._last_wait = ""
        self._take_model(
            keras_optimizers.training_variables,
            trains=True,
            shards=order.shards,
        )
        self.ahead = self.kept.ahead
        self.ahead.begin(
            self._coming(), functools.partial(self._refused.__setitem__, id(order.train))
        )
        self.replica_check = ReplicaCheck(self.session.strategy)
        self._compared = self._variables_to_compare()
        self.metrics = self._metrics_state()
        self.pause_vote: PauseVote | None = None
        self._train_logs: Any = None  # of the last step
        if order.pauses:
            self.own_hooks |= {"on_train_batch_end"}
            self.pause_vote = PauseVote(
                self.session.strategy, lambda: self.inbox.pauses == self.number
            )
        self.metrics.load(orders.FIRST_METRICS)
        self._metrics_before = [v.numpy() for v in self.metrics.variables]
        replica.leave_unreset(self.model, order.unreset)
        keras_models.set_plain_attributes(self.model, order.attributes)
        self._note_attributes()
        generation().begin_at(self.model, order.initial_epoch, order.initial_step)
        keras_runs.forget_validation_data(self.model)
        train, steps = inputs.passes_for(self.model, order.train, order.steps_per_epoch)
        validation, validation_steps = inputs.passes_for(
            self.model, order.validation, order.validation_steps
        )
        sources = {timing.TRAIN: order.train, timing.TEST: order.validation}
        at_end = replica.at_end_of_data(self.model, lambda kind: self._end_if_broken(sources[kind]))
        sigterm = leaving_sigterm_to_parent() if order.pauses else contextlib.nullcontext()
        with at_end, sigterm, self._dividing():
            keras_models.keras_method(self.model, "fit")(
                self._dataset(train),
                epochs=order.epochs,
                initial_epoch=order.initial_epoch,
                steps_per_epoch=steps,
                validation_data=None if validation is None else self._dataset(validation),
                validation_steps=validation_steps,
                validation_freq=order.validation_freq,
                callbacks=self._callbacks(),
                shuffle=False,  # the parent draws the order of the rows
                verbose=0,
            )
        return bool(self.model._nanotf_runs_python)

    def _coming(self) -> streams.Coming | None:
        train = self.order.train
        if not (isinstance(train, streams.StreamInput) and train.may_differ):
            return None
        return streams.Coming(self.reader, train.stream, self.order.passed_steps)

    def _metrics_state(self) -> state.SharedVariables:
        order = self.order
        return state.SharedVariables(
            order.metrics_layout,
            self.blocks[order.metrics_block],
            keras_metrics.metric_state(self.model),
        )

    def _on_hook(self, name: str, index: int | None, logs: Any) -> None:
        if name in orders.TRAIN_BATCH_HOOKS and index is not None and index < self._passed_steps():
            return  # the parent's callbacks have heard of it
        if name in self._BEFORE_PARENT:
            self._BEFORE_PARENT[name](self, index, logs)
        super()._on_hook(name, index, logs)
        if name in self._AFTER_PARENT:
            self._AFTER_PARENT[name](self, index, logs)

    def _begin_train(self, index: Any, logs: Any) -> None:
        self.model.stop_training = self.order.stop  # Keras has just set it to False

    def _begin_epoch(self, epoch: Any, logs: Any) -> None:
        self.epoch = epoch
        self.ahead.begin_epoch(*self._steps_ahead(epoch))
        if self.pause_vote is not None:
            self.pause_vote.begin_epoch(self._passed_steps())
            self.ahead.look_after(1)

    def _compare(self, epoch: Any, logs: Any) -> None:
        values = list((logs or {}).values())
        self.replica_check.compare(f"epoch {epoch}", values, self._compared)

    def _pass_over(self, epoch: Any, logs: Any) -> None:
        """Leaves out the steps of an earlier run, which took their batches and drew numbers."""
        if not self._passed_steps():
            return
        for variable, value in zip(self.metrics.variables, self._metrics_before, strict=True):
            write(variable, value)  # Keras has just reset them
        self._train_logs = self.order.passed_logs
        reads = not isinstance(self.order.train, inputs.ArrayInput)
        keras_steps.pass_over(self.model, self._passed_steps(), self.order.passed_logs, reads)

    def _passed_steps(self) -> int:
        """Returns the number of this epoch's steps that were complete before this call."""
        return self.order.passed_steps if self.epoch == self.order.initial_epoch else 0

    def _vote(self, index: Any, logs: Any) -> None:
        """Pauses after a step if the parent has asked any rank to."""
        vote = self.pause_vote
        if vote is None:
            return
        self._train_logs = logs
        made = keras_steps.steps_after(self.model, index, None)
        # The parent gets the state at the end of an epoch, even of one that a callback stops.
        if self.model.stop_training or not vote.is_due(made):
            return
        if vote.agree(made):
            self._send_held()
            self._last_wait = orders.PAUSE
            self._store_and_ask(orders.PAUSE, made, plain_logs(logs), True)
            # Else the next vote would pause once more. After the answer, which follows the request
            # in the channel: to another rank, the request may have come earlier.
            self.inbox.pauses = None
        self.ahead.look_after(vote.left(made))

    # What this process does at one of Keras's hooks, before the parent hears of it and after.
    _BEFORE_PARENT: ClassVar[Mapping[str, Callable[[FitRun, Any, Any], None]]] = {
        "on_train_begin": _begin_train,
        "on_epoch_begin": _begin_epoch,
        "on_epoch_end": _compare,
    }
    _AFTER_PARENT: ClassVar[Mapping[str, Callable[[FitRun, Any, Any], None]]] = {
        "on_epoch_begin": _pass_over,
        "on_train_batch_end": _vote,
    }

    def _variables_to_compare(self) -> list[Any]:
        """Returns the variables that could differ between workers."""
        update = self.kept.update
        alike = set() if update is None else set(map(id, update.alike))
        return [v for v in self.state.variables if id(keras_common.tf_variable(v)) not in alike]

    def _steps_ahead(self, epoch: int) -> tuple[int | None, int | None]:
        """Returns the arguments of `RunAhead.begin_epoch`."""
        order = self.order
        steps = order.steps_per_epoch or order.train.steps
        looked_at = order.stop or not order.waits.isdisjoint(orders.BATCH_HOOKS)
        if steps is None or looked_at or self.session.group is None:
            return None, None
        begun = max(order.initial_step, order.passed_steps) if epoch == order.initial_epoch else 0
        return steps - begun, steps * (order.epochs - epoch - 1)

    def _is_ahead(self) -> bool:
        return bool(self.ahead.made)

    def _is_stored(self, name: str) -> bool:
        """Returns True if nothing has changed since the state was stored.

        Between the end of the last epoch and the end of training, only an optimizer that keeps
        averages of the weights changes them: it replaces the weights by the averages.
        """
        averages = getattr(self.model.optimizer, "use_ema", False)
        return (self._last_wait, name) == ("on_epoch_end", "on_train_end") and not averages

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        with_state = name not in orders.BATCH_HOOKS and not self._is_stored(name)
        self._last_wait = name
        if name == "on_test_begin" and self.pause_vote is not None:
            logs = plain_logs(self._train_logs)  # for a checkpoint during validation
        answer = self._store_and_ask(name, index, logs, with_state)
        if answer.store:
            answer = self._store_and_ask(name, index, logs, True)
        if answer.attributes:
            keras_models.set_plain_attributes(self.model, answer.attributes)
            self._note_attributes()
        if answer.seeds is not None:
            generation().restore_seeds(answer.seeds)
        if answer.reload:
            self.state.load(self.turn)
        if answer.reload_metrics:
            self.metrics.load(orders.METRICS)

    def _store_and_ask(
        self, name: str, index: int | None, logs: messages.Logs | None, with_state: bool
    ) -> messages.Proceed:
        order, rank = self.order, self.session.rank
        attributes = self._changed_attributes() if rank == 0 else ()
        seeds = None
        if with_state:
            self.turn += 1
            self.state.store_rank(self.turn, rank)
            if rank == 0:
                seeds = generation().drawn_seeds()
        self.metrics.store_rank(orders.METRICS, rank)
        written: messages.Written = ()
        if self.session.says_written:
            spans = self.metrics.spans_of_rank(orders.METRICS, rank)
            written = messages.written(order.metrics_block, spans)
            if with_state:
                spans = self.state.spans_of_rank(self.turn, rank)
                written += messages.written(order.state_block, spans)
        return self._ask(
            name,
            index,
            logs,
            state=with_state,
            written=written,
            attributes=attributes,
            seeds=seeds,
        )


class EvaluateRun(_ModelRun):
    """One `evaluate` in one worker."""

    order: orders.EvaluateOrder
    stop_flag = "stop_evaluating"

    def _run(self) -> orders.Evaluated:
        order = self.order
        self._take_model(generation().model_variables)
        replica.leave_unreset(self.model, order.unreset)
        at_end = replica.at_end_of_data(self.model, lambda _: self._end_if_broken(order.data))
        with at_end, self._dividing():
            logs = keras_models.keras_method(self.model, "evaluate")(
                self._dataset(order.data),
                steps=order.steps,
                callbacks=self._callbacks(),
                return_dict=True,
                verbose=0,
            )
        self._send_held()
        variables = keras_metrics.metric_variables(self.model)
        return orders.Evaluated(
            logs,
            generation().metrics_in_order(self.model, logs),
            [variable.numpy() for variable in variables],
            self._left("evaluate"),
        )


class PredictRun(_ModelRun):
    """One `predict` in one worker."""

    order: orders.PredictOrder
    stop_flag = "stop_predicting"

    def _run(self) -> orders.Left:
        order = self.order
        self._take_model(generation().model_variables, metrics=False)
        self.writer = outputs.OutputWriter(self._send_outputs)
        with replica.outputs_to(self.model, self.writer.take), self._dividing():
            try:
                keras_models.keras_method(self.model, "predict")(
                    self._dataset(order.data),
                    steps=order.steps,
                    callbacks=self._callbacks(),
                    verbose=0,
                )
            except Exception:  # Keras's, which has no outputs to put together
                self._end_if_broken(order.data)
                raise
        self._end_if_broken(order.data)
        self._send_held()
        self.writer.flush()
        return self._left("predict")

    def _send_outputs(self, structure: bytes, steps: int, arrays: Any, block: Block) -> None:
        assert block.fd is not None
        message = messages.Outputs(self.number, structure, steps, arrays, block.nbytes)
        self.session.channel.send(message, [block.fd])

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        self.writer.flush()  # before a callback gets the batch's outputs
        self._ask(name, index, None)  # the logs hold outputs, which the writer has sent
