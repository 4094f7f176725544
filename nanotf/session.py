"""A worker's side of its jobs: one session for the life of the process."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import pickle
import random
import time
import traceback
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf import jobs, messages, replica
from nanotf.channel import Channel
from nanotf.collectives import Group
from nanotf.compat import autograph, keras_names
from nanotf.shipping import models, pickling, pipelines, state, streams
from nanotf.shipping.blocks import Block
from nanotf.strategy import WorkerStrategy, mark_as_share

MODELS_KEPT = 2
PROGRESS_SECONDS = 0.05  # Keras's own progress bar redraws no faster


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
        self.share = keras_names.LossShare()
        keras_names.install_worker_overrides(self.share)
        autograph.leave_tf_keras_alone()
        group = None
        if setup.group is not None:
            group = Group.attach(setup.group, rank, fds[0])
            os.close(fds[0])
        self.strategy = WorkerStrategy(rank, setup.size, cluster=setup.cluster, group=group)
        self._models: collections.OrderedDict[bytes, Any] = collections.OrderedDict()

    def run(self, inbox: Any, message: messages.Job, blocks: list[Block]) -> None:
        """Runs a job and reports its end."""
        try:
            job = pickling.loads(message.body)
            _FitRun(self, inbox, message.job, job, blocks).run()
            answer: messages.Message = messages.JobDone(message.job, self.rank)
        except BaseException as error:
            answer = _failure(message.job, self.rank, error)
        self.channel.send(answer)

    def model(self, recipe: bytes, seed: int, specs: Any) -> Any:
        """The model of a recipe, built now or by an earlier job, with metrics and optimizer.

        TensorFlow's own seed is set only when a model is built, since setting it makes
        TensorFlow forget every function that it has prepared, which takes seconds.
        """
        key = hashlib.sha256(recipe).digest()
        if key not in self._models:
            tf.random.set_seed(_sequence(seed, self.rank)[0])
            with self.strategy.known_values():
                model = models.rebuild(pickling.loads(recipe))
                keras_names.build_for_training(model, specs)
                keras_names.weigh_output_losses(model, self.share)
                keras_names.sum_gradients_first(model.optimizer)
            replica.become_replica(model, self.share)
            self._models[key] = model
        self._models.move_to_end(key)
        while len(self._models) > MODELS_KEPT:
            self._models.popitem(last=False)
        return self._models[key]


def _failure(job: int, rank: int, error: BaseException) -> messages.JobFailed:
    try:
        pickled = pickling.dumps(error)
        pickle.loads(pickled)
    except BaseException:
        pickled = b""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return messages.JobFailed(job, rank, f"{type(error).__name__}: {error}", text, pickled)


class _FitRun:
    """One `fit` in one worker."""

    def __init__(
        self, session: Session, inbox: Any, number: int, job: jobs.FitJob, blocks: list[Block]
    ) -> None:
        self.session = session
        self.inbox = inbox
        self.number = number
        self.job = job
        self.blocks = blocks
        self.turn = 0
        self._last_progress = 0.0
        self._last_wait = ""
        inbox.streams = self.reader = streams.StreamReader(session.channel, number)

    def run(self) -> None:
        job, session = self.job, self.session
        tf.keras.backend.set_floatx(job.settings.floatx)
        tf.keras.backend.set_image_data_format(job.settings.image_data_format)
        _seed(job.seed, session.rank)
        self.model = session.model(job.recipe, job.seed, job.specs)
        size = session.strategy.size
        type(self.model)._nanotf_may_be_empty = job.train.may_be_empty(size) or (
            job.validation is not None and job.validation.may_be_empty(size)
        )
        variables = keras_names.training_variables(self.model)
        self.state = state.State(
            job.layout, self.blocks[job.state_block], variables, session.strategy
        )
        self.state.load(self.turn)
        self.model.fit(
            self._dataset(job.train, job.initial_epoch),
            epochs=job.epochs,
            initial_epoch=job.initial_epoch,
            steps_per_epoch=job.steps_per_epoch,
            validation_data=None if job.validation is None else self._dataset(job.validation),
            validation_steps=job.validation_steps,
            validation_freq=job.validation_freq,
            callbacks=[self._reporter()],
            shuffle=False,
            verbose=0,
        )

    def _dataset(self, source: Any, first_epoch: int = 0) -> Any:
        rank, size = self.session.rank, self.session.strategy.size
        if isinstance(source, streams.StreamInput):
            return mark_as_share(*source.datasets(self.reader, rank, size))
        if isinstance(source, pipelines.PipelineInput):
            return mark_as_share(*source.datasets(rank, size))
        return mark_as_share(*source.dataset(self.blocks, rank, size, first_epoch))

    def _reporter(self) -> Any:
        """A Keras callback with the hooks that the parent wants to hear of, and no other."""
        namespace: dict[str, Any] = {}
        for hook in self.job.events | self.job.waits:
            namespace[hook] = self._hook(hook)
        reporter = type("Reporter", (tf.keras.callbacks.Callback,), namespace)
        return reporter()

    def _hook(self, name: str) -> Any:
        waits = name in self.job.waits

        def hook(_: Any, *arguments: Any, **named: Any) -> None:
            index, logs = jobs.index_and_logs(name, *arguments, **named)
            if waits:
                self._wait(name, index, _plain(logs))
            elif self.session.rank == 0 and self._is_due(name):
                event = messages.Event(self.number, name, index, _plain(logs))
                self.session.channel.send(event)

        return hook

    def _is_due(self, name: str) -> bool:
        if name not in jobs.BATCH_HOOKS:
            return True
        now = time.monotonic()
        if now - self._last_progress < PROGRESS_SECONDS:
            return False
        self._last_progress = now
        return True

    def _is_stored(self, name: str) -> bool:
        """Whether nothing has changed since the state was stored.

        Between the end of the last epoch and the end of training only an optimizer that
        keeps averages of the weights changes something: it puts them in place.
        """
        averages = getattr(self.model.optimizer, "use_ema", False)
        return (self._last_wait, name) == ("on_epoch_end", "on_train_end") and not averages

    def _wait(self, name: str, index: int | None, logs: messages.Logs | None) -> None:
        with_state = name not in jobs.BATCH_HOOKS and not self._is_stored(name)
        if with_state:
            self.turn += 1
            self.state.store_rank(self.turn, self.session.rank)
        self._last_wait = name
        rank = self.session.rank
        self.session.channel.send(
            messages.Waiting(
                self.number, rank, name, index, logs if rank == 0 else None, with_state
            )
        )
        answer = self.inbox.answer()
        if answer.reload:
            self.state.load(self.turn)
        if answer.stop:
            self.model.stop_training = True


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
