"""With `fit(resume=folder)` a new process continues training, as if the first had not ended."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits
from preempted_job import Job, assert_same_results, place

from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.keras import Sequential
from nanotf.parent.resume.store import OWN

L = tf.keras.layers
_SEQUENCE: Any = tf.keras.utils.PyDataset if is_keras_3() else tf.keras.utils.Sequence
pytestmark = pytest.mark.usefixtures("float64")


class _Preempted(Exception):
    """The user's own handler of SIGTERM raises it, so that this process continues."""


class _Preempt(tf.keras.callbacks.Callback):
    """Sends SIGTERM to this process at a hook of an epoch."""

    def __init__(self, epoch: int, hook: str, index: int | None = None) -> None:
        super().__init__()
        self._at = (epoch, index)
        self._epoch = -1
        setattr(self, hook, self._signal)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def _signal(self, *arguments: Any, **_: Any) -> None:
        index = arguments[0] if arguments and isinstance(arguments[0], int) else None
        epoch, at = self._at
        if self._epoch == epoch and at in (None, index):
            os.kill(os.getpid(), signal.SIGTERM)


class _Record(tf.keras.callbacks.Callback):
    """Records hooks, and lowers the learning rate when an epoch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.heard.append(["epoch", epoch])
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.9)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.heard.append(batch)


@pytest.fixture
def preemptible() -> Iterator[None]:
    def handler(*_: Any) -> None:
        raise _Preempted

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


def _model(units: int = 16, optimizer: Any = None) -> Any:
    tf.keras.utils.set_random_seed(11)
    # By default, Keras 2's dropout draws from a state in TensorFlow that nobody can read.
    dropout = L.Dropout(0.2, **({} if is_keras_3() else {"rng_type": "stateful"}))
    layers = [L.Input((8, 8, 1)), L.Flatten(), L.Dense(units, "tanh"), dropout, L.Dense(10)]
    model = Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def _arrays() -> dict[str, Any]:
    x, y = digits(240)
    held = (x[200:], y[200:])
    return {"x": x[:200], "y": y[:200], "batch_size": 40, "validation_data": held}


def _fit(folder: pathlib.Path | None, *more: Any, model: Any = None, **arguments: Any) -> Any:
    """Trains a new model; returns it, its history and the hooks that its callbacks heard."""
    model, record = model or _model(), _Record()
    stop = tf.keras.callbacks.EarlyStopping("val_loss", patience=9)
    arguments = {"epochs": 4, "verbose": 0, **arguments}
    history = model.fit(resume=folder, callbacks=[record, stop, *more], **arguments)
    return model, history, record.heard


def _assert_same(found: Any, expected: Any) -> None:
    assert_same_history(found[1].history, expected[1].history)
    assert found[1].epoch == expected[1].epoch
    assert found[2] == expected[2]
    assert_same_state(found[0], expected[0])


def _interrupt(folder: pathlib.Path, *at: Any, **arguments: Any) -> tuple[int, int]:
    with pytest.raises(_Preempted):
        _fit(folder, _Preempt(*at), **arguments)
    return place(folder)


@pytest.mark.both_generations
@pytest.mark.usefixtures("preemptible")
def test_one_run_in_parts_with_workers_and_without(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shuffled arrays, dropout, Adam, validation, callbacks with state; five parts of one run."""

    def said() -> str:
        """Returns nanotf's line."""
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if line.startswith("nanotf: ")]
        return line

    data = _arrays()
    expected = _fit(None, **data)  # Keras's own `fit`
    parts = tmp_path / "parts"
    two = {**data, "num_processes": 2}
    # Workers end the step at which they next ask each other.
    assert _interrupt(parts, 0, "on_train_batch_end", 1, **two) in [(0, 2), (0, 3), (0, 4)]
    assert _interrupt(parts, 1, "on_train_batch_end", 0, **data) == (1, 1)
    assert "nanotf: " not in capsys.readouterr().out, "verbose=0"
    assert _interrupt(parts, 1, "on_test_begin", **two, verbose=2) == (1, 5)
    place_of = "nanotf: Training continues at epoch {}, from {}."
    assert said() == place_of.format("2 of 4, after step 1 of 5", parts)
    assert _interrupt(parts, 2, "on_epoch_end", **data, verbose=2) == (3, 0)
    assert said() == place_of.format("2 of 4, after step 5 of 5", parts)
    found = _fit(parts, **two, verbose=2)
    assert said() == place_of.format("4 of 4", parts)
    _assert_same(found, expected)
    assert len(list((parts / OWN).glob("checkpoint-*"))) == 2
    # A finished training returns its history at once, with other numbers of workers as well.
    _assert_same(_fit(parts, **data, verbose=2), expected)
    nothing = f"nanotf: Nothing is left to train: {parts} holds the state after 4 of 4 epochs."
    assert said() == nothing


@pytest.mark.thorough
@pytest.mark.usefixtures("preemptible")
@pytest.mark.every_case
@pytest.mark.parametrize("processes", [(None, 2), (2, None)])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_begin"])
@pytest.mark.parametrize("read", [False, True])
def test_several_steps_per_execution(
    read: bool, hook: str, processes: Any, tmp_path: pathlib.Path
) -> None:
    """Two steps an execution. In Keras 2 the last of an epoch's five is one by itself."""

    def made() -> Any:
        model = _model()
        model.compile(model.optimizer, model.loss, metrics=["accuracy"], steps_per_execution=2)
        return model

    size = 50 if is_keras_3() else 40
    data = {**_arrays(), "batch_size": size}
    if read:
        held = data["validation_data"]
        data = {"validation_data": tf.data.Dataset.from_tensor_slices(held).batch(40)}

    def arguments(number: int | None) -> dict[str, Any]:
        x = {"x": _dataset(size)} if read else {}
        return {"model": made(), "num_processes": number, **data, **x}

    first, second = processes
    expected = _fit(tmp_path / "undisturbed", **arguments(first))
    parts = tmp_path / "parts"
    assert _interrupt(parts, 1, hook, **arguments(first)) in [(1, 2), (1, 4), (1, 200 // size)]
    _assert_same(_fit(parts, **arguments(second)), expected)


@pytest.mark.thorough
@pytest.mark.usefixtures("preemptible")
def test_grpc(tmp_path: pathlib.Path) -> None:
    data = {**_arrays(), "epochs": 2}
    workers = {**data, "num_processes": 2, "transport": "grpc"}
    expected = _fit(tmp_path / "undisturbed", **data)
    parts = tmp_path / "parts"
    epoch, step = _interrupt(parts, 0, "on_train_batch_end", 0, **workers)
    assert (epoch, step) > (0, 0)
    assert _interrupt(parts, 1, "on_train_batch_end", 0, **data) == (1, 1)
    _assert_same(_fit(parts, **workers), expected)


class _Altered(_SEQUENCE):  # type: ignore[misc, valid-type]
    """Batches that Keras shuffles and that random numbers alter."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        x, y = digits(200)
        part = slice(40 * index, 40 * (index + 1))
        return x[part] + np.random.uniform(0, 0.1), y[part]


def _dataset(size: int = 40) -> Any:
    return tf.data.Dataset.from_tensor_slices(digits(200)).shuffle(200, seed=5).batch(size)


def _endless() -> Any:
    return _dataset().repeat()


@pytest.mark.thorough
@pytest.mark.every_case
@pytest.mark.usefixtures("preemptible")
@pytest.mark.parametrize("make", [_dataset, _endless, _Altered])
@pytest.mark.parametrize("processes", [(None, None), (2, 2), (None, 2), (2, None)])
def test_data_that_are_read_again(make: Any, processes: Any, tmp_path: pathlib.Path) -> None:
    first, second = processes
    steps = 4 if make is _endless else None

    def arguments(number: int | None) -> dict[str, Any]:
        tf.keras.utils.set_random_seed(3)
        return {"x": make(), "steps_per_epoch": steps, "num_processes": number}

    expected = _fit(tmp_path / "undisturbed", **arguments(first))
    parts = tmp_path / "parts"
    assert _interrupt(parts, 0, "on_epoch_end", **arguments(first)) == (1, 0)
    assert _interrupt(parts, 2, "on_train_batch_end", 1, **arguments(second)) > (2, 1)
    _assert_same(_fit(parts, **arguments(first)), expected)


@pytest.mark.usefixtures("preemptible")
def test_a_damaged_checkpoint(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _arrays()
    expected = _fit(tmp_path / "undisturbed", **data)
    parts = tmp_path / "parts"
    _interrupt(parts, 2, "on_train_batch_end", 2, **data)
    newest = max((parts / OWN).glob("checkpoint-*")) / "arrays.npz"
    newest.write_bytes(newest.read_bytes()[:-100])
    (parts / ".unfinished-by-a-killed-process").mkdir()
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        found = _fit(parts, **data)
    (line,) = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert "incomplete or has changed" in line
    _assert_same(found, expected)


def test_another_call(tmp_path: pathlib.Path) -> None:
    """A call that differs is refused before a worker starts, and nothing is overwritten."""
    data = {**_arrays(), "epochs": 2}
    expected = _fit(tmp_path, **data)
    fewer = {**data, "x": data["x"][:190], "y": data["y"][:190]}
    for message, arguments in {
        r"variable number 0 '.*dense.*' of shape \(64, 17\).*\(64, 16\)": {"model": _model(17)},
        r"optimizer \['SGD'\], and in .* \['Adam'\]": {"model": _model(16, "sgd")},
        "batch_size 20, and in .* it is 40": {"batch_size": 20},
        "shuffle False, and in .* it is True": {"shuffle": False},
        "samples 190, and in .* it is 200": fewer,
        "epochs=1, and .* is in epoch 2": {"epochs": 1},
        "BackupAndRestore": {"callbacks": [tf.keras.callbacks.BackupAndRestore("unused")]},
    }.items():
        model = arguments.pop("model", None) or _model()
        with pytest.raises(InvalidArgumentError, match=message):
            model.fit(resume=tmp_path, verbose=0, num_processes=2, **{**data, **arguments})
    _assert_same(_fit(tmp_path, **data), expected)
    longer = _fit(tmp_path, **{**data, "epochs": 3})
    _assert_same(longer, _fit(tmp_path / "undisturbed", **{**data, "epochs": 3}))


def test_data_and_folders_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    x, y = digits(80)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidArgumentError, match="a folder that can be written"):
        _model().fit(x, y, resume=file, num_processes=2)
    with pytest.raises(InvalidArgumentTypeError, match="the path of a folder"):
        _model().fit(x, y, resume=3, num_processes=2)
    with pytest.raises(InvalidArgumentError, match="which can be read only once"):
        _model().fit(((x, y) for _ in range(4)), steps_per_epoch=2, resume=tmp_path)
    if is_keras_3():
        with pytest.raises(InvalidArgumentError, match="must divide the steps of a pass"):
            _model().fit(x, y, batch_size=20, steps_per_epoch=3, resume=tmp_path)
        model = _model()
        model.compile(model.optimizer, model.loss, steps_per_execution=3)
        with pytest.raises(InvalidArgumentError, match="steps_per_execution=3, and 4 steps in an"):
            model.fit(x, y, batch_size=20, resume=tmp_path, num_processes=2)


class _Noise(L.Layer):  # type: ignore[misc]
    def call(self, x: Any, training: bool = False) -> Any:
        return x + tf.random.uniform(tf.shape(x), dtype=x.dtype)


@pytest.mark.both_generations
def test_random_numbers_that_no_checkpoint_holds(tmp_path: pathlib.Path) -> None:
    x, y = digits(80)
    layers = [_Noise()] if is_keras_3() else [_Noise(), L.Dropout(0.5)]
    for layer in layers:
        model = Sequential([L.Input((8, 8, 1)), L.Flatten(), layer, L.Dense(10)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        with pytest.raises(InvalidArgumentError, match=r"RandomUniform in Sequential\.train_step"):
            model.fit(x, y, resume=tmp_path, num_processes=2)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(InvalidArgumentError, match="run_eagerly=True"):
        model.fit(x, y, resume=tmp_path)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    tf.random.set_seed(None)  # as in a program that sets none
    noisy = data.map(lambda x, y: (x + tf.random.uniform((), dtype=x.dtype), y))
    with pytest.raises(InvalidArgumentError, match="RandomUniform without a seed"):
        _model().fit(noisy, resume=tmp_path)
    assert not any(tmp_path.iterdir())


def test_two_runs_in_one_folder(tmp_path: pathlib.Path) -> None:
    """The second is refused while the first trains, and nothing of the first changes."""
    data, folder = {**_arrays(), "epochs": 2}, tmp_path / "one"

    class Second(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            with pytest.raises(InvalidArgumentError, match="which another fit in this process"):
                _model().fit(resume=folder, num_processes=2, **data)

    found = _fit(folder, Second(), **data)
    _assert_same(found, _fit(tmp_path / "alone", **data))
    _assert_same(_fit(folder, **data), found)


def test_sigterm_ends_a_job_after_a_checkpoint(tmp_path: pathlib.Path) -> None:
    undisturbed, job = Job(tmp_path, "undisturbed", 3), Job(tmp_path, "parts", 3)
    undisturbed.run_here()
    assert job.run(2, end_at=1) == -signal.SIGTERM  # 143 in a shell
    epoch, step = place(job.folder)
    assert epoch == 1
    assert step > 0
    job.run_here()
    assert_same_results(job, undisturbed)
