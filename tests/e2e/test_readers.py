"""`read_processes`: reader processes give the batches of one process."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state
from waiting import wait_until

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, ReaderDied, ShippingError
from nanotf.keras import Sequential

L = tf.keras.layers
PyDataset: Any = tf.keras.utils.Sequence
BATCH, BATCHES = 6, 7


class Rows(PyDataset):
    """Rows in an order that changes at every epoch's end."""

    def __init__(self, batches: int = BATCHES) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        self.x = random.normal(size=(batches * BATCH, 4))
        self.y = random.integers(0, 3, batches * BATCH)
        self.order = np.arange(batches * BATCH)

    def __len__(self) -> int:
        return len(self.order) // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class Drawn(Rows):
    """Rows with noise from every generator that `__getitem__` may use."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)
        self.old = np.random.RandomState(4)

    def __getitem__(self, index: int) -> Any:
        import random

        x, y = super().__getitem__(index)
        noise = [
            np.random.normal(size=x.shape),
            self.generator.normal(size=x.shape),
            self.old.normal(size=x.shape),
            tf.random.normal(x.shape, dtype=tf.float64).numpy(),
            random.random(),
        ]
        return x + sum(noise), y


def _linear() -> Any:
    tf.keras.utils.set_random_seed(2)
    model = Sequential([L.Input((4,)), L.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def _fit(data: Any, **arguments: Any) -> Any:
    model = _linear()
    model.fit(data, **{"epochs": 3, "verbose": 0, **arguments})
    return model


def _same(found: Any, expected: Any) -> None:
    assert_same_history(found.history.history, expected.history.history)
    assert_same_state(found, expected)


@pytest.mark.both_generations
def test_readers_give_the_numbers_of_one_process(float64: None) -> None:
    """Shuffled by Keras, and by `on_epoch_end`; validation data are read, too."""
    expected = _fit(Rows(), validation_data=Rows(2))
    alone = _fit(Rows(), validation_data=Rows(2), read_processes=2)
    beside = _fit(Rows(), validation_data=Rows(2), read_processes=2, num_processes=2)
    _same(alone, expected)
    _same(beside, expected)
    assert alone.history.nanotf.read_processes == 2
    assert "2 workers, read by 2 processes" in beside.history.nanotf.title


@pytest.mark.both_generations
def test_random_numbers_do_not_depend_on_the_number_of_readers(float64: None) -> None:
    one = _fit(Drawn(), read_processes=1)
    three = _fit(Drawn(), read_processes=3)
    beside = _fit(Drawn(), read_processes=2, num_processes=2)
    _same(three, one)
    _same(beside, one)
    losses = one.history.history["loss"]
    assert len(set(losses)) == len(losses)


class Steady(Rows):
    """The same noise-free batch each time, so that only the noise can differ."""

    def __getitem__(self, index: int) -> Any:
        return np.random.normal(size=(BATCH, 4)), np.zeros(BATCH, "int64")

    def on_epoch_end(self) -> None:
        pass


@pytest.mark.thorough
def test_random_numbers_differ_between_batches_epochs_and_seeds(float64: None) -> None:
    model = _linear()
    found = [model.predict(Steady(), verbose=0, read_processes=2) for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])  # no step in between: the same seed
    assert len(np.unique(found[0], axis=0)) == len(found[0])
    tf.keras.utils.set_random_seed(3)
    assert not np.array_equal(model.predict(Steady(), verbose=0, read_processes=2), found[0])


class Broken(Exception):
    """An exception unknown to TensorFlow."""


class Breaking(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise Broken("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.every_case
def test_a_batch_that_raises(workers: int | None) -> None:
    text = r"^no such file\n\nBreaking\.__getitem__\(4\), in reader \d.*, raised Broken in:\n"
    with pytest.raises(Broken, match=text) as e:
        _fit(Breaking(), shuffle=False, read_processes=2, num_processes=workers)
    assert 'raise Broken("no such file")' in str(e.value)


class Deadly(Rows):
    """A dataset whose batch 3 kills the process that reads it, as often as a file says."""

    def __init__(self, file: pathlib.Path) -> None:
        super().__init__()
        self.file = str(file)

    def __getitem__(self, index: int) -> Any:
        if index == 3 and (left := int(pathlib.Path(self.file).read_text())):
            pathlib.Path(self.file).write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_reader_that_dies(
    float64: None, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "left"
    file.write_text("2")
    _same(_fit(Deadly(file), read_processes=2, max_restarts=2), _fit(Rows()))
    assert file.read_text() == "0"
    assert caplog.text.count("Its batches are read again") == 2
    file.write_text("1")
    with pytest.raises(ReaderDied, match=r"Reader \d .*SIGKILL.*while it read batch") as error:
        _fit(Deadly(file), read_processes=2)
    assert error.value.signal == signal.SIGKILL
    assert error.value.rank in (0, 1)


class Holding(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def _one_batch() -> Any:
    yield np.zeros((2, 4)), np.zeros(2)


REFUSED = {
    "zero": (Rows, 0, InvalidArgumentError, "at least 1.*read_processes=0"),
    "bool": (Rows, True, InvalidArgumentTypeError, "must be an integer.*read_processes=True"),
    "word": (Rows, "many", InvalidArgumentTypeError, "must be an integer.*'many'.*'auto'"),
    "array": (lambda: np.zeros((4, 4)), 1, InvalidArgumentError, "ndarray.*Leave read_processes"),
    "generator": (_one_batch, 1, InvalidArgumentError, r"generator.*PyDataset whose __getitem__"),
    "dataset": (
        lambda: tf.data.Dataset.from_tensors((np.zeros((2, 4)), np.zeros(2))),
        1,
        InvalidArgumentError,
        "num_parallel_calls",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.every_case
def test_refused_before_any_process_starts(name: str) -> None:
    make, number, kind, words = REFUSED[name]
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(kind, match=words):
        _linear().fit(make(), verbose=0, read_processes=number)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_refused_together_with_resume(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoints"
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(InvalidArgumentError, match=r"read_processes=2 and resume=.*Leave one"):
        _fit(Rows(), read_processes=2, resume=str(folder))
    assert not folder.exists()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_dataset_that_cannot_travel() -> None:
    with pytest.raises(ShippingError, match=r"Holding.*`lock`.*_thread\.lock"):
        _fit(Holding(), read_processes=1)


def test_readers_end_with_their_call() -> None:
    before = set(psutil.Process().children(recursive=True))
    pids: list[int] = []

    class Look(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            now = set(psutil.Process().children(recursive=True)) - before
            pids.extend(process.pid for process in now)

    _fit(Rows(), read_processes=2, callbacks=[Look()], epochs=1)
    assert len(pids) >= 2
    zygote = nanotf.pool.forks.pid()
    wait_until(lambda: not any(psutil.pid_exists(p) for p in pids if p != zygote), "readers end")


class Still(Rows):
    """Rows in one order: what has been read ahead of an epoch's end is the same after it."""

    def on_epoch_end(self) -> None:
        pass


class Endless(Still):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % BATCHES)


@pytest.mark.thorough
@pytest.mark.skipif(not is_keras_3(), reason="Keras 2's sequences have an end")
def test_an_endless_dataset(float64: None) -> None:
    expected = _fit(Endless(), steps_per_epoch=4)
    _same(_fit(Endless(), steps_per_epoch=4, read_processes=2, num_processes=2), expected)


class Level(Rows):
    """Batches of a difficulty that a callback sets."""

    level = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.level, y


class Harder(tf.keras.callbacks.Callback):
    def __init__(self, data: Level) -> None:
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.data.level = epoch + 1.0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("workers", [None, 2])
def test_changes_by_a_callback_reach_the_readers(
    float64: None, steps: int | None, workers: int | None
) -> None:
    if steps is not None and workers is None:
        pytest.skip("TensorFlow reads ahead across epochs, with and without readers")

    def fit(**arguments: Any) -> Any:
        data = Level()
        return _fit(data, callbacks=[Harder(data)], steps_per_epoch=steps, **arguments)

    _same(fit(read_processes=2, num_processes=workers), fit(num_processes=workers))


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [None, 2])
def test_evaluate_and_predict(float64: None, workers: int | None) -> None:
    model = _linear()
    how = {"verbose": 0, "read_processes": 2, "num_processes": workers}
    np.testing.assert_allclose(model.evaluate(Still(), **how), model.evaluate(Still(), verbose=0))
    np.testing.assert_allclose(model.predict(Still(), **how), model.predict(Still(), verbose=0))


class Slow(Rows):
    def __getitem__(self, index: int) -> Any:
        total = 0.0
        for number in range(200_000):  # Python code, as that of a decoder
            total += number
        return super().__getitem__(index)


@pytest.mark.thorough
def test_auto_adds_readers_while_training_waits(
    float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanotf.machine.topology.usable_count", lambda: 4)
    found = _fit(Slow(), read_processes="auto", epochs=6)
    assert 1 < found.history.nanotf.read_processes <= 3
    again = _fit(Slow(), read_processes="auto", epochs=6)
    assert again.history.nanotf.read_processes >= found.history.nanotf.read_processes
    _same(found, _fit(Rows(), epochs=6))


@pytest.mark.thorough
@pytest.mark.own_pool
def test_readers_and_a_worker_that_dies(float64: None) -> None:
    killed: list[int] = []

    class Kill(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and not killed:
                killed.append(nanotf.worker_pids()[1])
                os.kill(killed[0], signal.SIGKILL)

    expected = _fit(Drawn(), read_processes=2)
    found = _fit(Drawn(), read_processes=2, num_processes=2, max_restarts=1, callbacks=[Kill()])
    assert killed
    _same(found, expected)
