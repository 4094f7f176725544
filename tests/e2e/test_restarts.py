"""With `fit(max_restarts=K)` training ends as if no worker had died."""

from __future__ import annotations

import logging
import os
import pathlib
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, small_cnn

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, WorkerDied
from nanotf.keras import Sequential
from nanotf.parent.fit import fit_call

_SEQUENCE: Any = tf.keras.utils.PyDataset if is_keras_3() else tf.keras.utils.Sequence
pytestmark = pytest.mark.own_pool

FIT = {"batch_size": 50, "verbose": 0, "num_processes": 2, "epochs": 4}


class _Kill(tf.keras.callbacks.Callback):
    """Kills a worker at a hook, `times` times; records the hooks called."""

    def __init__(self, hook: str, index: int | None, rank: int = 1, times: int = 1) -> None:
        super().__init__()
        self.heard: list[tuple[str, Any]] = []
        self._kills = (hook, index, rank)
        self._left = times
        for name in {"on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", hook}:
            setattr(self, name, self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(*arguments: Any, **_: Any) -> None:
            index = arguments[0] if arguments and isinstance(arguments[0], int) else None
            if name.startswith(("on_epoch", "on_train_b", "on_train_e")) and "batch" not in name:
                self.heard.append((name, index))
            kills, at, rank = self._kills
            if name == kills and at in (None, index) and self._left > 0 and self._in_time():
                self._left -= 1
                os.kill(nanotf.worker_pids()[rank], signal.SIGKILL)

        return hook

    def _in_time(self) -> bool:
        """Returns True if epoch 2 (the third) has begun."""
        return ("on_epoch_begin", 2) in self.heard


def _adam() -> Any:
    return small_cnn(tf.keras.optimizers.Adam(0.01))


def _same_as_undisturbed(kill: _Kill, make: Callable[[], Any] = _adam, **arguments: Any) -> Any:
    x, y = digits(200)
    arguments = {"x": x, "y": y, **FIT, **arguments}
    # Omits the batch size if the data have batches.
    arguments = {k: v for k, v in arguments.items() if v is not None}
    expected, found = make(), make()
    extra = arguments.pop("callbacks", list)
    before = expected.fit(**arguments, callbacks=[*extra()])
    after = found.fit(**arguments, callbacks=[kill, *extra()], max_restarts=2)
    assert after.epoch == before.epoch == list(range(FIT["epochs"]))
    assert_same_history(after.history, before.history)
    assert_same_state(found, expected)
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("float64")
@pytest.mark.both_generations
def test_killed_in_the_middle_of_an_epoch(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Arrays are shuffled; the optimizer has slots, divided between the workers."""
    kill = _Kill("on_train_batch_end", 1, rank)
    _same_as_undisturbed(kill, shuffle=True)
    assert kill.heard == [
        ("on_train_begin", None),
        ("on_epoch_begin", 0),
        ("on_epoch_end", 0),
        ("on_epoch_begin", 1),
        ("on_epoch_end", 1),
        ("on_epoch_begin", 2),
        ("on_epoch_begin", 2),
        ("on_epoch_end", 2),
        ("on_epoch_begin", 3),
        ("on_epoch_end", 3),
        ("on_train_end", None),
    ]
    (line,) = [r.getMessage() for r in caplog.records if "restart" in r.getMessage()]
    assert f"Worker {rank} (pid " in line
    assert "SIGKILL" in line
    assert "continues at epoch 3 of 4, with new workers" in line
    assert "restart 1 of 2" in line
    assert "The other workers" not in line  # nanotf restarts them at once


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("hook", ["on_test_begin", "on_epoch_end", "on_train_end"])
@pytest.mark.thorough
def test_killed_at_other_moments(hook: str) -> None:
    """Kills workers in validation, between epochs, and after the last epoch."""
    x, y = digits(60)
    kill = _Kill(hook, {"on_epoch_end": 2}.get(hook))
    _same_as_undisturbed(kill, validation_data=(x, y))
    assert kill.heard[-1] == ("on_train_end", None)
    assert [h for h in kill.heard if h[0] == "on_epoch_end"] == [
        ("on_epoch_end", n) for n in range(4)
    ]


class _Noise(tf.keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x + tf.random.uniform(tf.shape(x), dtype=x.dtype)


@pytest.mark.thorough
def test_random_numbers_that_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    x, y = digits(200)
    L = tf.keras.layers
    model = Sequential([L.Input((8, 8, 1)), L.Flatten(), _Noise(), L.Dense(10, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    kill = _Kill("on_train_batch_end", 1)
    history = model.fit(x, y, **FIT, callbacks=[kill], max_restarts=1)
    assert history.epoch == list(range(FIT["epochs"]))
    (line,) = [r.getMessage() for r in caplog.records if "random numbers differ" in r.getMessage()]
    assert "RandomUniform in Sequential.train_step" in line


@pytest.mark.usefixtures("float64")
def test_callbacks_keep_their_state() -> None:
    """A schedule, and a stop that depends on all epochs so far."""

    def callbacks() -> list[Any]:
        return [
            tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            tf.keras.callbacks.EarlyStopping("loss", patience=50, restore_best_weights=True),
            tf.keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
        ]

    _same_as_undisturbed(_Kill("on_train_batch_end", 2), callbacks=callbacks)


def _stopping() -> list[Any]:
    def stop(epoch: int, logs: Any) -> None:
        made.model.stop_training = epoch == 2

    made = tf.keras.callbacks.LambdaCallback(on_epoch_end=stop)
    return [made]


@pytest.mark.thorough
def test_killed_after_a_callback_stopped_training() -> None:
    x, y = digits(200)
    kill = _Kill("on_epoch_end", 2)
    history = _adam().fit(x, y, **FIT, callbacks=[*_stopping(), kill], max_restarts=1)
    assert history.epoch == [0, 1, 2]
    assert kill.heard[-1] == ("on_train_end", None)
    assert history.nanotf.size == 2
    assert history.nanotf.total > 0
    assert "running" in str(history.nanotf)


@pytest.mark.usefixtures("float64")
@pytest.mark.thorough
def test_endless_arrays_continue_in_the_middle_of_a_pass() -> None:
    """4 batches a pass, 2 steps an epoch: the third epoch begins the second pass."""
    _same_as_undisturbed(_Kill("on_train_batch_end", 0), steps_per_epoch=2, shuffle=True)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sharding", ["parent", "data"])
@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.thorough
def test_a_shuffled_dataset_is_read_again(sharding: str, endless: bool) -> None:
    x, y = digits(200)

    def data() -> Any:
        made = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200, seed=5).batch(50)
        return made.repeat() if endless else made

    arguments = {**FIT, "sharding": sharding, "steps_per_epoch": 3 if endless else None}
    arguments.pop("batch_size")
    expected, found = _adam(), _adam()
    before = expected.fit(data(), **arguments)
    after = found.fit(
        data(), **arguments, callbacks=[_Kill("on_train_batch_end", 1)], max_restarts=1
    )
    assert_same_history(after.history, before.history)
    assert_same_state(found, expected)


class _Batches(_SEQUENCE):  # type: ignore[misc, valid-type]
    """Batches of a `PyDataset` or `Sequence`, altered at random; counts the ends of its epochs."""

    def __init__(self) -> None:
        super().__init__()
        self._data = digits(200)
        self.ended = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x, y = (rows[10 * index : 10 * (index + 1)] for rows in self._data)
        return x + np.random.uniform(0, 0.1) + random.uniform(0, 0.1), y

    def on_epoch_end(self) -> None:
        self.ended += 1


def _by_a_python_function() -> Any:
    x, y = digits(200)

    def rows(index: Any) -> Any:
        return x[int(index)], y[int(index)]

    def read(index: Any) -> Any:
        image, label = tf.py_function(rows, [index], [x.dtype, y.dtype])
        return tf.ensure_shape(image, x.shape[1:]), tf.ensure_shape(label, y.shape[1:])

    return tf.data.Dataset.range(200).shuffle(200, seed=5).map(read).batch(50)


@pytest.mark.every_case
@pytest.mark.usefixtures("float64")
def test_shuffled_files_are_read_again(tmp_path: pathlib.Path) -> None:
    """Their number of batches is unknown."""
    for number in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / str(number))) as file:
            for row in np.random.default_rng(number).normal(size=(70, 4)):
                file.write(row.tobytes())

    def parsed(record: Any) -> Any:
        row = tf.ensure_shape(tf.io.decode_raw(record, tf.float64), (4,))
        return row, tf.reduce_sum(row**2, keepdims=True)

    def data() -> Any:
        files = tf.data.TFRecordDataset([str(tmp_path / "0"), str(tmp_path / "1")])
        return files.map(parsed).shuffle(200, seed=5).batch(32)

    def make() -> Any:
        tf.keras.utils.set_random_seed(1)
        model = Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.02), "mse")
        return model

    expected, found = make(), make()
    arguments = {**FIT, "batch_size": None}
    before = expected.fit(data(), **arguments)
    kill = _Kill("on_train_batch_end", 1)
    after = found.fit(data(), **arguments, callbacks=[kill], max_restarts=1)
    assert kill.heard.count(("on_epoch_begin", 2)) == 2
    assert_same_history(after.history, before.history)
    if not is_keras_3():  # new workers determine the length again; Keras 2 counts a step for that
        expected.optimizer.iterations.assign_add(1)
    assert_same_state(found, expected)


def _kill_the_first_new_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills a worker of the first restart before it has read anything."""
    stock = fit_call.FitCall.on_sent

    def on_sent(call: Any) -> None:
        stock(call)
        if call.restarts == 1:
            os.kill(nanotf.worker_pids()[0], signal.SIGKILL)

    monkeypatch.setattr(fit_call.FitCall, "on_sent", on_sent)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("make_data", [_Batches, _by_a_python_function])
@pytest.mark.thorough
def test_random_data_of_the_parent_are_read_again(
    make_data: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data repeat the incomplete epoch's order and alterations; workers die twice."""
    expected, found = _adam(), _adam()
    arguments = {**FIT, "shuffle": True}
    arguments.pop("batch_size")
    tf.keras.utils.set_random_seed(1)
    data = [make_data(), make_data()]
    before = expected.fit(data[0], **arguments)
    tf.keras.utils.set_random_seed(1)
    _kill_the_first_new_workers(monkeypatch)
    kill = _Kill("on_train_batch_end", 1)
    after = found.fit(data[1], **arguments, callbacks=[kill], max_restarts=2)
    assert kill.heard.count(("on_epoch_begin", 2)) == 2
    assert_same_history(after.history, before.history)
    assert_same_state(found, expected)
    if make_data is _Batches:
        assert data[1].ended == data[0].ended


def test_a_generator_continues() -> None:
    x, y = digits(200)

    def batches() -> Any:
        while True:
            for start in range(0, 200, 50):
                yield x[start : start + 50], y[start : start + 50]

    arguments = {**FIT, "steps_per_epoch": 4}
    arguments.pop("batch_size")
    history = _adam().fit(
        batches(), **arguments, callbacks=[_Kill("on_train_batch_end", 1)], max_restarts=1
    )
    assert history.epoch == [0, 1, 2, 3]
    assert np.all(np.isfinite(history.history["loss"]))


def test_no_more_restarts_than_allowed() -> None:
    x, y = digits(200)
    model, kill = _adam(), _Kill("on_train_batch_end", 1, times=5)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        model.fit(x, y, **FIT, callbacks=[kill], max_restarts=2)
    assert [h for h in kill.heard if h == ("on_epoch_begin", 2)] == [("on_epoch_begin", 2)] * 3
    assert np.isfinite(model.fit(x, y, **{**FIT, "epochs": 1}).history["loss"][0])


def test_a_users_exception_is_no_reason_to_restart() -> None:
    x, y = digits(200)
    calls: list[int] = []

    def fail(epoch: int, logs: Any) -> None:
        calls.append(epoch)
        raise LookupError("a callback of the user's")

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(LookupError, match="of the user's"):
        _adam().fit(x, y, **FIT, callbacks=[callback], max_restarts=3)
    assert calls == [0]


def test_invalid_max_restarts() -> None:
    x, y = digits(50)
    with pytest.raises(InvalidArgumentTypeError, match="max_restarts='2'"):
        small_cnn().fit(x, y, num_processes=2, max_restarts="2")
    with pytest.raises(InvalidArgumentError, match="max_restarts=-1"):
        small_cnn().fit(x, y, num_processes=2, max_restarts=-1)


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="nanotf")
