"""A worker's side of its jobs: one session for the life of the process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.collectives import Group
from nanotf.compat import keras_callbacks, keras_names, keras_optimizers
from nanotf.errors import CollectiveError
from nanotf.region import losses, overrides
from nanotf.region.sharded_update import OptimizerShards, ShardedUpdate
from nanotf.region.share import Share
from nanotf.region.strategy import WorkerStrategy, mark_as_share
from nanotf.shipping import (
    captured,
    inputs,
    jobs,
    models,
    objects,
    outputs,
    pickling,
    pipelines,
    state,
    streams,
)
from nanotf.wire import messages, timing
from nanotf.wire.blocks import Block
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.failures import Failure
from nanotf.worker import output, replica, watch
from nanotf.worker.loop_run import LoopRun

MODELS_KEPT = 2
# A model that is dropped is one of many objects that refer to each other, and Python looks for
# such by their number, not by their size.
DROPPED_BYTES = 2**27
JOBS_PER_COLLECTION = 16
PROGRESS_SECONDS = 0.05  # Keras's own progress bar redraws no faster
_SHARE = tf.TensorSpec([], tf.float64)  # what the step of a replica takes beside the data


class Session:
    """What a worker keeps between jobs: its strategy, and the models that it has built.

    Args:
        rank: int.
        channel: `Channel` to the parent.
        setup: `messages.Setup`.
        fds: list of int, the descriptor of the group's memory if `setup` names a group.
    """

    def __init__(self, rank: int, channel: Channel, setup: messages.Setup, fds: list[int]) -> None:
        self.rank = rank
        self.channel = channel
        self.says_written = setup.says_written
        self.share = Share()
        group = None
        if setup.group is not None:
            group = Group.attach(setup.group, rank, fds[0])
            os.close(fds[0])
        self.strategy = WorkerStrategy(rank, setup.size, cluster=setup.cluster, group=group)
        overrides.install(self.share, self.strategy)
        self._group = group
        self.stopwatch = timing.Stopwatch(rank, group)
        self.reader: streams.StreamReader  # of the job that runs
        self.watched: Callable[[], None] = lambda: None  # what a `Watch` calls at every look
        watch.Heartbeat(
            watch.beat_seconds(setup.stall_seconds),
            self.stopwatch.progress,
            lambda: self._tell(messages.Progress()),
        )
        if group is None:
            stopwatch = self.stopwatch

            def tell(began: int) -> None:
                self._tell(messages.Stalled(began))

            watch.Watch(
                setup.stall_seconds,
                lambda: stopwatch.step_since,
                tell,
                lambda: self.watched(),
            )
        self._models: collections.OrderedDict[bytes, _KeptModel] = collections.OrderedDict()
        self.programs: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
        self._dropped = 0  # bytes of variables of models that are not kept, and may be there
        self._jobs = 0

    def _tell(self, message: messages.Message) -> None:
        with contextlib.suppress(ChannelClosed):  # the inbox ends this process
            self.channel.send(message)

    def run(
        self,
        inbox: Any,
        message: messages.Job,
        blocks: list[Block],
        reader: streams.StreamReader,
    ) -> None:
        """Runs a job, as `inbox` has handed it out, and reports its end."""
        self.stopwatch.begin()
        self.reader = reader
        failed, _ = self._failures()
        try:
            job = pickling.loads(message.body)
            run = _RUNS[type(job)](self, inbox, message.job, job, blocks)
            try:
                result = run.run()
            except _Abandoned:
                result = None  # the parent knows why
            times = self.stopwatch.finish()
            answer: messages.Message = messages.JobDone(
                message.job, self.rank, result, times, run.written
            )
        except BaseException as error:
            answer = _failure(message.job, self.rank, error)
            reader.end()  # before the error, which may hold the last reference to an iterator
            count, why = self._failures()
            # TensorFlow keeps the text alone of what has failed in a graph.
            if count > failed and _is_of_op(error):
                answer = dataclasses.replace(answer, failure=why)
        reader.end()
        try:
            self.channel.send(answer)
        except ChannelClosed:
            raise
        except Exception as error:  # a result that cannot be pickled
            self.channel.send(_failure(message.job, self.rank, error))
        self._jobs += 1
        if self._jobs % JOBS_PER_COLLECTION == 0:
            # Datasets of jobs that have ended hang in cycles, and each mapping of a block that one
            # holds has a file descriptor. Python would leave them for hundreds of jobs.
            gc.collect()

    def _failures(self) -> tuple[int, Failure | None]:
        return (0, None) if self._group is None else self._group.failures()

    def model(
        self,
        recipe: bytes,
        specs: Any,
        seed: int,
        metrics: bool = True,
        optimizers: dict[Any, Any] | None = None,
        shards: OptimizerShards | None = None,
    ) -> Any:
        """The model of a recipe, built now or by an earlier job.

        Metrics and optimizers are built by the first job that needs them.

        TensorFlow's own seed is set only when a model is built, since setting it makes
        TensorFlow forget every function that it has prepared, which takes seconds.
        """
        # Functions that were traced keep the settings of that time.
        key = hashlib.sha256(recipe + repr(jobs.KerasSettings.taken()).encode()).digest()
        kept = self._models.get(key)
        if kept is None or (
            optimizers is not None and kept.has_optimizer and kept.shards != shards
        ):
            tf.random.set_seed(_sequence(seed, self.rank)[0])
            with self.strategy.known_values():
                loaded = captured.Loaded(recipe)
                model = models.build(loaded.recipe)
                loaded.compile(model)
                models.exclude_from_decay(model, loaded.recipe)
                held = loaded.captured(model)
            replica.become_replica(model, self.share, self.stopwatch, held, self.strategy)
            keras_names.compile_forward(model)
            kept = self._models[key] = _KeptModel(model)
        self._models.move_to_end(key)
        while len(self._models) > MODELS_KEPT:
            self._drop(self._models.popitem(last=False)[1])
        with self.strategy.known_values():
            if metrics and not kept.has_metrics:
                step = "test_step" if optimizers is None else "train_step"
                self._build_metrics(kept, specs, step)
            if optimizers is not None and not kept.has_optimizer:
                self._build_optimizers(kept, specs, optimizers, shards)
        return kept.model

    def _drop(self, kept: _KeptModel) -> None:
        variables = keras_optimizers.training_variables(kept.model)
        self._dropped += sum(v.shape.num_elements() * v.dtype.size for v in variables)
        if self._dropped > DROPPED_BYTES:
            self._dropped, kept.model = 0, None
            gc.collect()

    def _build_metrics(self, kept: _KeptModel, specs: Any, step: str) -> None:
        own = keras_names.has_own_step(kept.model, step)
        trace = replica.again(functools.partial(keras_names.trace_step, kept.model, step))
        keras_names.build_metrics(
            kept.model,
            specs,
            (lambda: trace((specs, _SHARE), self.strategy)) if own else None,
        )
        losses.follow_share(kept.model, self.share)
        kept.has_metrics = True

    def _build_optimizers(
        self,
        kept: _KeptModel,
        specs: Any,
        optimizers: dict[Any, Any],
        shards: OptimizerShards | None,
    ) -> None:
        model, update = kept.model, None
        if shards is not None:
            trainable = model.trainable_variables
            update = ShardedUpdate(self.strategy, model.optimizer, trainable, shards)
        objects.build_optimizers([model], optimizers)
        build = replica.again(functools.partial(keras_optimizers.build_optimizers, model))
        build((specs, _SHARE), self.strategy)
        replica.weigh_steps(model, update, self.strategy)
        replica.average_before_validation(model, self.strategy)
        kept.has_optimizer, kept.shards = True, shards


@dataclasses.dataclass
class _KeptModel:
    """A model in a worker, and how much of it is built."""

    model: Any
    has_metrics: bool = False
    has_optimizer: bool = False
    shards: OptimizerShards | None = None


def _failure(job: int, rank: int, error: BaseException) -> messages.JobFailed:
    try:
        pickled = pickling.dumps(error)
        pickle.loads(pickled)
    except BaseException:
        pickled = b""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return messages.JobFailed(job, rank, f"{type(error).__name__}: {error}", text, pickled)


def _is_of_op(error: BaseException | None) -> bool:
    """Whether an op or a collective has raised, or what was raised because of that."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (tf.errors.OpError, CollectiveError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


class _Abandoned(Exception):
    """All ranks end the job at this point, since the user's data have raised in the parent."""


@functools.cache
def _reporter_class(hooks: frozenset[str]) -> Any:
    """A callback class with these hooks alone, since Keras spares itself what none has.

    It is not one job's: TensorFlow never lets go of the first 1024 classes whose objects it is
    given (the type cache in `tensorflow/python/util/util.cc`), nor of what these refer to.
    """

    def calling(name: str) -> Any:
        def hook(self: Any, *arguments: Any, **named: Any) -> None:
            self.hear(name, *arguments, **named)

        return hook

    return type("Reporter", (tf.keras.callbacks.Callback,), {name: calling(name) for name in hooks})


class _ModelRun:
    """One job of a model's method in one worker.

    Args:
        session: `Session`.
        inbox: `worker.Inbox`.
        number: int, the job's.
        job: a `jobs.ModelJob`.
        blocks: list of `Block`, those of the job.
    """

    job: Any
    stop_flag: str  # the attribute of a model by which a callback ends what runs
    own_hooks: frozenset[str] = frozenset()  # that are heard, whether the parent asks or not
    written: messages.Written = ()  # see `messages.JobDone`

    def __init__(
        self, session: Session, inbox: Any, number: int, job: Any, blocks: list[Block]
    ) -> None:
        self.session = session
        self.inbox = inbox
        self.number = number
        self.job = job
        self.blocks = blocks
        self._last_progress = 0.0
        self._held: dict[str, tuple[int | None, Any]] = {}  # events of the last batch
        self.reader = session.reader
        self._refused: dict[int, Exception] = {}  # by source, the error of its last batch

    def run(self) -> Any:
        """Does the job; returns its result, see `jobs`."""
        raise NotImplementedError

    def _take_model(self, variables_of: Any, *inputs: Any, **parts: Any) -> None:
        """Sets `model` and `state`, with the parent's settings, seed and values.

        Args:
            variables_of: callable of the model, the variables that `state` holds.
            *inputs: the job's `ArrayInput` and `StreamInput`, or None.
            **parts: of `Session.model`.
        """
        job, session = self.job, self.session
        job.settings.put()
        _seed(job.seed, session.rank)
        self.model = session.model(job.recipe, job.specs, job.seed, **parts)
        size = session.strategy.size
        expected = any(source is not None and source.may_be_empty(size) for source in inputs)
        replica.expect_empty_shares(self.model, expected)
        self.state = _state(self.model, variables_of, job, self.blocks[job.state_block], session)
        self.state.load(0)
        session.stopwatch.ready()

    def _dataset(self, source: Any, first_epoch: int = 0) -> Any:
        rank, size = self.session.rank, self.session.strategy.size
        if isinstance(source, streams.StreamInput):
            return mark_as_share(*source.datasets(self.reader, rank, size))
        if isinstance(source, pipelines.PipelineInput):
            refuse = functools.partial(self._refused.__setitem__, id(source))
            return mark_as_share(*source.datasets(rank, size, refuse))
        return mark_as_share(*source.dataset(self.blocks, rank, size, first_epoch))

    def _prints(self) -> Any:
        """In this context the user sees what the model's steps print.

        Not the error stream: what Keras warns of there, the parent's Keras has said already.
        """
        job = self.job
        return output.to_parent(self.session, self.number, job.terminal, ("stdout",), job.quiet)

    def _end_if_broken(self, source: Any) -> None:
        """Where data have ended: abandons the job if it is since they raised or are refused."""
        if isinstance(source, streams.StreamInput) and self.reader.is_broken(source.stream):
            raise _Abandoned
        error = self._refused.get(id(source))
        if error is not None:
            if self.session.rank == 0:
                self.session.channel.send(messages.DataFailed(self.number, None, error))
            raise _Abandoned

    def _seeds(self) -> list[Any]:
        """Where the random layers stand, which draw in a pass without training, too."""
        local = self.session.strategy.experimental_local_results
        return [local(v)[0].numpy() for v in keras_names.seed_variables(self.model)]

    def _callbacks(self) -> list[Any]:
        passes = self.session.stopwatch.callback(tf.keras.callbacks.Callback)
        return [passes, self._reporter()]

    def _reporter(self) -> Any:
        """A Keras callback with the hooks that the parent wants to hear of, and no other."""
        reporter = _reporter_class(self.own_hooks | self.job.events | self.job.waits)()
        reporter.hear = self._hear
        return reporter

    def _hear(self, name: str, *arguments: Any, **named: Any) -> None:
        """One of Keras's hooks."""
        index, logs = jobs.index_and_logs(name, *arguments, **named)
        if name not in jobs.BATCH_HOOKS:
            self._send_held()
        if name in self.job.waits:
            with self.session.stopwatch.hook():
                self._wait(name, index, _plain(logs))
        elif self.session.rank == 0 and name in self.job.events:
            self._report(name, index, logs)

    def _report(self, name: str, index: int | None, logs: Any) -> None:
        """Sends an event; of those of batches no more than a progress bar shows, and the last."""
        if name not in jobs.BATCH_HOOKS:
            self._send(name, index, logs)
            return
        self._held[name] = (index, logs)
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self._send_held()

    def _send_held(self) -> None:
        for name, (index, logs) in self._held.items():
            self._send(name, index, logs)
        self._held.clear()

    def _send(self, name: str, index: int | None, logs: Any) -> None:
        self.session.channel.send(messages.Event(self.number, name, index, _plain(logs)))

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        self._ask(name, index, logs)

    def _ask(
        self,
        name: str,
        index: int | None,
        logs: messages.Logs | None,
        with_state: bool = False,
        written: messages.Written = (),
    ) -> messages.Proceed:
        """Waits until all ranks are at this hook and the parent says how to go on."""
        rank = self.session.rank
        self.session.channel.send(
            messages.Waiting(
                self.number, rank, name, index, logs if rank == 0 else None, with_state, written
            )
        )
        answer: messages.Proceed = self.inbox.answer()
        if answer.abandon:
            raise _Abandoned
        if answer.stop:
            setattr(self.model, self.stop_flag, True)
        return answer


class _FitRun(_ModelRun):
    """One `fit` in one worker."""

    job: jobs.FitJob
    stop_flag = "stop_training"
    own_hooks = frozenset({"on_train_begin"})

    def run(self) -> None:
        job = self.job
        self.turn = 0
        self._last_wait = ""
        self._take_model(
            keras_optimizers.training_variables,
            job.train,
            job.validation,
            optimizers=job.optimizers,
            shards=job.shards,
        )
        self.metrics = self._metrics_state()
        keras_callbacks.begin_at(self.model, job.initial_epoch, job.initial_step)
        keras_names.forget_validation_data(self.model)
        train, steps = self._passes(job.train, job.steps_per_epoch)
        validation, validation_steps = self._passes(job.validation, job.validation_steps)
        sources = {timing.TRAIN: job.train, timing.TEST: job.validation}
        at_end = replica.at_end_of_data(self.model, lambda kind: self._end_if_broken(sources[kind]))
        with at_end, self._prints():
            self.model.fit(
                self._dataset(train, job.initial_epoch),
                epochs=job.epochs,
                initial_epoch=job.initial_epoch,
                steps_per_epoch=steps,
                validation_data=None if validation is None else self._dataset(validation),
                validation_steps=validation_steps,
                validation_freq=job.validation_freq,
                callbacks=self._callbacks(),
                shuffle=False,
                verbose=0,
            )

    def _passes(self, source: Any, steps: int | None) -> tuple[Any, int | None]:
        """The source and number of steps that make an execution of several steps end rightly.

        With Keras 3 it ends where the data do, and nowhere else. Otherwise an array's dataset is
        endless, so that Keras keeps one iterator.
        """
        several = keras_names.runs_several_steps(self.model)
        if several and isinstance(source, inputs.ArrayInput) and steps == source.steps:
            return dataclasses.replace(source, passes=1), None
        return source, steps

    def _metrics_state(self) -> state.State:
        job, session = self.job, self.session
        return state.State(
            job.metrics_layout,
            self.blocks[job.metrics_block],
            keras_names.metric_state(self.model),
            session.strategy,
            rank=session.rank,
            divides_sums=True,
        )

    def _hear(self, name: str, *arguments: Any, **named: Any) -> None:
        if name == "on_train_begin":
            self.model.stop_training = self.job.stop  # Keras has just set it to False
        super()._hear(name, *arguments, **named)

    def _is_stored(self, name: str) -> bool:
        """Whether nothing has changed since the state was stored.

        Between the end of the last epoch and the end of training only an optimizer that
        keeps averages of the weights changes something: it puts them in place.
        """
        averages = getattr(self.model.optimizer, "use_ema", False)
        return (self._last_wait, name) == ("on_epoch_end", "on_train_end") and not averages

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        with_state = name in self.job.asks
        if name not in jobs.BATCH_HOOKS:
            with_state = not self._is_stored(name)
        self._last_wait = name
        answer = self._store_and_ask(name, index, logs, with_state)
        if answer.store:
            answer = self._store_and_ask(name, index, logs, True)
        if answer.reload:
            self.state.load(self.turn)
        if answer.reload_metrics:
            self.metrics.load(0)

    def _store_and_ask(
        self, name: str, index: int | None, logs: messages.Logs | None, with_state: bool
    ) -> messages.Proceed:
        job, rank = self.job, self.session.rank
        if with_state:
            self.turn += 1
            self.state.store_rank(self.turn, rank)
        self.metrics.store_rank(0, rank)
        written: messages.Written = ()
        if self.session.says_written:
            written = messages.written(job.metrics_block, self.metrics.spans_of_rank(0, rank))
            if with_state:
                spans = self.state.spans_of_rank(self.turn, rank)
                written += messages.written(job.state_block, spans)
        return self._ask(name, index, logs, with_state, written)


class _EvaluateRun(_ModelRun):
    """One `evaluate` in one worker."""

    job: jobs.EvaluateJob
    stop_flag = "stop_evaluating"

    def run(self) -> jobs.Evaluated:
        job, strategy = self.job, self.session.strategy
        self._take_model(keras_names.model_variables, job.data)
        at_end = replica.at_end_of_data(self.model, lambda _: self._end_if_broken(job.data))
        with at_end, self._prints():
            logs = self.model.evaluate(
                self._dataset(job.data),
                steps=job.steps,
                callbacks=self._callbacks(),
                return_dict=True,
                verbose=0,
            )
        self._send_held()
        variables = keras_names.metric_variables(self.model)
        return jobs.Evaluated(
            logs,
            keras_names.metrics_in_order(self.model, logs),
            [strategy.experimental_local_results(v)[0].numpy() for v in variables],
            keras_names.step_count(self.model, "evaluate"),
            self._seeds(),
        )


class _PredictRun(_ModelRun):
    """One `predict` in one worker."""

    job: jobs.PredictJob
    stop_flag = "stop_predicting"

    def run(self) -> jobs.Predicted:
        job = self.job
        self._take_model(keras_names.model_variables, metrics=False)
        self.writer = outputs.OutputWriter(self._send_outputs)
        with replica.outputs_to(self.model, self.writer.take), self._prints():
            try:
                self.model.predict(
                    self._dataset(job.data),
                    steps=job.steps,
                    callbacks=self._callbacks(),
                    verbose=0,
                )
            except Exception:  # Keras's, which has no outputs to put together
                self._end_if_broken(job.data)
                raise
        self._end_if_broken(job.data)
        self._send_held()
        self.writer.flush()
        return jobs.Predicted(keras_names.step_count(self.model, "predict"), self._seeds())

    def _send_outputs(self, structure: bytes, steps: int, arrays: Any, block: Block) -> None:
        rank = self.session.rank
        assert block.fd is not None
        self.session.channel.send(
            messages.Outputs(self.number, rank, structure, steps, arrays, block.nbytes), [block.fd]
        )

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        self.writer.flush()  # a callback gets the batch's outputs
        self._ask(name, index, None)


_RUNS: dict[type, Any] = {
    jobs.FitJob: _FitRun,
    jobs.EvaluateJob: _EvaluateRun,
    jobs.PredictJob: _PredictRun,
    jobs.LoopJob: LoopRun,
}


def _state(
    model: Any, variables_of: Any, job: jobs.ModelJob, block: Block, session: Session
) -> state.State:
    """The state of a worker's model: variables that it has as a whole, and parts of others."""
    update = model._nanotf_update if isinstance(job, jobs.FitJob) else None
    parts = [] if update is None else [state.Part(*part) for part in update.variables()]
    partial = {id(part.variable) for part in parts}
    variables = [v for v in variables_of(model) if id(v) not in partial]
    variables += model._nanotf_captured.variables
    return state.State(
        job.layout,
        block,
        variables,
        session.strategy,
        parts,
        seeds=keras_names.seed_variables(model),
        rank=session.rank,
        divides_sums=isinstance(job, jobs.FitJob),
    )


def _plain(logs: Any) -> messages.Logs | None:
    """Logs as plain numbers, whatever tensors or arrays Keras put in."""
    if not logs:
        return None
    plain = {}
    for name, value in logs.items():
        with contextlib.suppress(AttributeError):
            value = value.numpy()
        plain[name] = (
            value.item()
            if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0
            else value
        )
    return plain


def _sequence(seed: int, rank: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(2)]


def _seed(seed: int, rank: int) -> None:
    """Gives every worker random numbers of its own, the same in every run of the same job."""
    first, second = _sequence(seed, rank)
    random.seed(first)
    np.random.seed(second)
