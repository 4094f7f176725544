"""Workers wait only for callbacks that need every batch, and store their state only where asked."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from callback_parts import losing
from parity import digits, small_cnn
from tensorflow.python.eager import context

import nanotf
from nanotf.compat.eager_context import FirstUse
from nanotf.compat.keras_common import tf_variable
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.parent.fit.fit_call import FitCall
from nanotf.shipping import orders


def _needs(*callbacks: Any, verbose: Any = 1) -> ParentCallbacks:
    return ParentCallbacks(list(callbacks), losing(), verbose, 1, 6)


def test_workers_wait_only_for_batch_hooks_with_code(
    tmp_path: pathlib.Path,
) -> None:
    k = tf.keras.callbacks
    path = str(tmp_path / "x.weights.h5")

    class OwnEpochs(k.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pass

    class OwnCheckpoint(k.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)

    idle = [
        k.ModelCheckpoint(path, save_weights_only=True),
        OwnCheckpoint(path, save_weights_only=True),
        k.BackupAndRestore(str(tmp_path)),
        k.TensorBoard(str(tmp_path), profile_batch=0),
        k.CSVLogger(str(tmp_path / "x.csv")),
        k.EarlyStopping(),
        k.ReduceLROnPlateau(),
        k.LearningRateScheduler(lambda epoch: 0.1),
        k.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        OwnEpochs(),
    ]
    idle += [k.SwapEMAWeights()] if hasattr(k, "SwapEMAWeights") else []
    needs = _needs(*idle)
    assert not needs.waits & set(orders.BATCH_HOOKS)
    assert needs.events & set(orders.BATCH_HOOKS) <= {
        "on_train_batch_end",
        "on_test_batch_end",
        "on_predict_batch_end",
    }
    assert not (_needs(*idle, verbose=0).events & set(orders.BATCH_HOOKS))


def test_callbacks_that_wait_at_batches(tmp_path: pathlib.Path) -> None:
    k = tf.keras.callbacks
    path = str(tmp_path / "x.weights.h5")

    class Own(k.TerminateOnNaN):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            pass

    def waits(callback: Any) -> set[str]:
        return set(_needs(callback).waits) & set(orders.BATCH_HOOKS)

    assert waits(k.TerminateOnNaN()) == {"on_train_batch_end"}
    board = k.TensorBoard(str(tmp_path), update_freq=2, write_steps_per_second=True)
    assert "on_train_batch_end" in waits(board)
    assert waits(Own()) == {"on_train_batch_begin", "on_train_batch_end"}
    own = k.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    assert waits(own) == {"on_train_batch_end"}
    saver = k.ModelCheckpoint(path, save_weights_only=True, save_freq=3)
    assert "on_train_batch_end" in waits(saver)


class Looking(tf.keras.callbacks.Callback):
    """Calls a function at each third batch and at each epoch's end, and keeps its result."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.look, self.found = look, list[Any]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % 3 == 2:
            self.found.append(self.look(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append(self.look(self.model))


def _weights(model: Any) -> list[Any]:
    return [weight.numpy() for weight in model.weights]


@tf.function
def _sum_of(variables: list[Any]) -> Any:
    return tf.add_n([tf.reduce_sum(variable) for variable in variables])


_LOOKS: dict[str, Callable[[Any], Any]] = {
    "weights": _weights,
    "slots": lambda model: [v.numpy() for v in model.optimizer.variables],
    "function": lambda model: _sum_of(model.trainable_variables).numpy(),
    "predict": lambda model: model.predict(digits(16)[0], verbose=0),
    "raw operation": lambda model: tf.raw_ops.ReadVariableOp(
        resource=tf_variable(model.weights[0]).handle, dtype=tf.float32
    ).numpy(),
    "random": lambda model: (
        tf.keras.random.uniform((3,)).numpy() if hasattr(tf.keras, "random") else 0
    ),
}


@pytest.mark.parametrize(
    ("name", "thread"),
    [*((name, "own") for name in _LOOKS), ("weights", "new"), ("weights", "old")],
)
def test_a_batch_hook_finds_the_state_however_it_looks(name: str, thread: str) -> None:
    """At the batch at which it looks, as in one process."""
    with concurrent.futures.ThreadPoolExecutor(1) as old:
        old.submit(int).result()  # its thread is older than the call
        _compare_looks(_LOOKS[name], thread, old)


def _compare_looks(here: Callable[[Any], Any], thread: str, old: Any) -> None:
    def look(model: Any) -> Any:
        if thread == "own":
            return here(model)
        if thread == "old":
            return old.submit(here, model).result()
        with concurrent.futures.ThreadPoolExecutor(1) as new:
            return new.submit(here, model).result()

    found = []
    for processes in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(3)
        model, looking = small_cnn(), Looking(look)
        _sum_of(model.trainable_variables)
        x, y = digits(190)  # the last batch is smaller
        model.fit(x, y, 20, 2, verbose=0, callbacks=[looking], shuffle=False, **processes)
        found.append(looking.found)
        assert len(looking.found) == 2 * (3 + 1)
    tf.nest.map_structure(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=2e-4, atol=2e-5), *found
    )


def test_first_uses_within_each_other() -> None:
    """All that are awaited act, and the context is as before."""
    kind, acted = type(context.context()), list[str]()
    outer, inner = (FirstUse(functools.partial(acted.append, name)) for name in ("outer", "inner"))
    with outer.awaited():
        with inner.awaited():
            pass
        assert acted == []
        with FirstUse(functools.partial(acted.append, "second")).awaited():
            tf.constant(1)
        assert acted == ["outer", "second"]
        tf.constant(1)
    assert acted == ["outer", "second"] and type(context.context()) is kind


def test_workers_store_their_state_only_for_hooks_that_use_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[str] = []
    with_state = FitCall.with_state

    def noting(call: FitCall) -> Any:
        first = with_state(call)
        stored.append(f"{first.hook} {first.index}")
        return first

    monkeypatch.setattr(FitCall, "with_state", noting)
    x, y = digits(80)
    small_cnn().fit(
        x, y, 20, verbose=0, callbacks=[Looking(lambda model: model.name)], num_processes=2
    )
    assert not stored
    model, losses = small_cnn(), list[float]()
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    model.fit(x, y, 20, verbose=0, callbacks=[note, Looking(_weights)], num_processes=2)
    assert stored == ["on_train_batch_end 2"] and len(losses) == 4


def test_a_change_at_a_batch_holds_from_the_next_step_on() -> None:
    ends = []
    for processes in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(3)
        model = small_cnn()
        zero = Looking(lambda model: model.layers[-1].bias.assign_add([1.0] * 10))
        x, y = digits(110)
        model.fit(x, y, 20, verbose=0, callbacks=[zero], shuffle=False, **processes)
        ends.append(_weights(model))
    for one, two in zip(*ends, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=2e-5)


@pytest.mark.own_pool
def test_a_hook_that_swallows_the_death_of_a_worker_does_not_hide_it() -> None:
    def look(model: Any) -> None:
        os.kill(nanotf.worker_pids()[1], signal.SIGKILL)
        with contextlib.suppress(Exception):
            _weights(model)

    x, y = digits(80)
    with pytest.raises(nanotf.errors.WorkerDied):
        small_cnn().fit(x, y, 20, verbose=0, callbacks=[Looking(look)], num_processes=2)


def test_a_callback_declares_its_needs_at_batches() -> None:
    class Bar(tf.keras.callbacks.Callback):
        nanotf_needs = "progress"

        def __init__(self) -> None:
            super().__init__()
            self.batches: list[int] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches.append(batch)

    needs = _needs(Bar())
    assert not needs.waits & set(orders.BATCH_HOOKS) and not needs.look_at_model
    assert "on_train_batch_end" in needs.events
    bar = Bar()
    x, y = digits(60)
    small_cnn().fit(x, y, batch_size=20, verbose=0, callbacks=[bar], num_processes=2)
    assert bar.batches and bar.batches[-1] == 2, "the last is always reported"
    bar.nanotf_needs = "logs"
    needs = _needs(bar)
    assert "on_train_batch_end" in needs.waits
    bar.nanotf_needs = "everything"
    with pytest.raises(nanotf.errors.InvalidArgumentError, match=r"nanotf_needs=.everything"):
        _needs(bar)
