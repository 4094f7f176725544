"""`num_processes="auto"`: its choices, and trials that leave no traces."""

from __future__ import annotations

import os
import pathlib
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, small_cnn

import nanotf
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.keras import Model, Sequential
from nanotf.machine import neighbours
from nanotf.parent.auto import candidates, choice, choice_cache, first_epochs, rule, timed_fits
from nanotf.parent.auto.choice import decide
from nanotf.parent.auto.timed_fits import Measured
from nanotf.parent.resume import store
from nanotf.parent.where import Where
from nanotf.pool import handshake, warm

pytestmark = pytest.mark.own_pool
L = tf.keras.layers


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    # Without XDG_CACHE_HOME: another environment needs another import of TensorFlow for workers.
    monkeypatch.setattr(choice_cache, "path", lambda: tmp_path / "tuning.json")
    # What is measured is remembered for the cores, which pools of other runs would change.
    monkeypatch.setattr(neighbours, "taken_cores", dict)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the tried numbers; any fit is worth measuring, however short it is."""
    found: list[int] = []
    stock = timed_fits.measure

    def measure(trial: Any, number: int, *args: Any) -> Measured:
        found.append(number)
        measured = stock(trial, number, *args)
        assert measured.step is not None and measured.step > 0
        return Measured(number, measured.step, start_up=0.0)

    monkeypatch.setattr(timed_fits, "measure", measure)
    monkeypatch.setattr(timed_fits, "MEASURED_SECONDS", 0.1)
    _allow(monkeypatch)
    return found


def _allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "SHARE", 1e9)
    monkeypatch.setattr(first_epochs, "MEASURED_STEPS", 1)


def _choose(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(choice, "decide", lambda measured, steps: number)


# ------------------------------------------------------------------------------ decisions
def test_the_fastest_is_chosen_if_worth_its_start() -> None:
    one, two, four = Measured(1, 0.100, 5.0), Measured(2, 0.060, 6.0), Measured(4, 0.050, 8.0)
    assert decide([one, two, four], steps=10_000) == 4
    assert decide([one, two, four], steps=180) == 2  # 18 s; 6 + 10.8 s; 8 + 9 s
    assert decide([one, two, four], steps=100) == 1  # starting workers costs as much as they gain
    assert decide([one, two, four], steps=None) == 4
    assert decide([one, Measured(2, 0.097)], steps=None) == 1  # no clear gain
    assert decide([one, Measured(2, None, note="not tried")], steps=None) == 1
    assert decide([Measured(1, None, note="failed"), two], steps=None) == 1


def test_a_short_fit_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started nor prepared, and Keras trains as without "auto"."""

    def started(*_: Any) -> Any:
        raise AssertionError("a trial of a fit that takes less than a second")

    monkeypatch.setattr(timed_fits, "TimedFit", started)
    monkeypatch.setattr(choice, "TimedFit", started)
    monkeypatch.setattr(rule, "SHARE", 1e-9)  # however busy the machine is
    monkeypatch.setattr(first_epochs, "MEASURED_STEPS", 1)
    x, y = digits(110)
    results = []
    for number in (None, "auto"):
        model, calls = _with_dropout(), _Calls()
        history = model.fit(x, y, epochs=3, verbose=2, callbacks=calls, num_processes=number)
        results.append((history.history, history.epoch, calls.said, _random_numbers()))
    assert results[1] == results[0]
    assert not nanotf.worker_pids()
    said = capsys.readouterr().out
    assert "one process, not measured: the rest takes about" in said
    assert "they pay from about" in said
    assert '"auto" measures from' in said
    assert said.index("not measured") < said.rindex("Epoch 2/3")
    one_epoch = model.fit(x, y, verbose=2, num_processes="auto")
    assert len(one_epoch.history["loss"]) == 1
    assert "one process, not measured: this call takes about" in capsys.readouterr().out
    assert choice_cache.entries() == {}


def test_one_core(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(candidates, "numbers", lambda *_: [1])
    x, y = digits(20)
    history = small_cnn().fit(x, y, verbose=2, num_processes="auto")
    assert history.nanotf.size == 1
    assert "one process is all that the usable cores allow" in capsys.readouterr().out
    assert not nanotf.worker_pids()


# --------------------------------------------------------------------------------- traces
def _with_dropout() -> Any:
    tf.keras.utils.set_random_seed(5)
    model = Sequential([L.Flatten(), L.Dropout(0.3), L.Dense(10)])  # not built
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def _random_numbers() -> list[float]:
    return [random.random(), float(np.random.random()), float(tf.random.uniform([]))]


class _Calls(tf.keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.said.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.said.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.said.append(f"batch {batch}")


def _shuffled(x: Any, y: Any, seed: int | None = None) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100, seed).batch(20)


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_one_process_leaves_no_trace(
    float64: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tries: list[int],
    kind: str,
) -> None:
    x, y = digits(110)
    _choose(monkeypatch, 1)
    last = nanotf.last_report()
    results = []
    for number in (None, "auto"):
        model, calls = _with_dropout(), _Calls()
        data = (x, y) if kind == "arrays" else (_shuffled(x, y),)
        # Twice: traces of the trial might show late.
        for _ in range(2):
            history = model.fit(*data, epochs=3, verbose=2, callbacks=[calls], num_processes=number)
        results.append((model, history.history, calls.said, _random_numbers()))
    (expected, *alike), (found, *also) = results
    assert_same_history(also[0], alike[0])
    assert also[1:] == alike[1:]
    assert_same_state(found, expected)
    assert tries == [2]  # the second call remembers
    said = capsys.readouterr().out
    assert "one process: " in said
    assert "ms a step beside" in said
    assert "; measured in" in said
    assert "; as measured on" in said
    assert nanotf.last_report() is last  # not a trial's


def _schedule(epoch: int, rate: float) -> float:
    return rate * 0.5


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_workers_train_the_rest(
    float64: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tries: list[int],
    kind: str,
) -> None:
    """Of one training, as callbacks, the history and the progress bar see it."""
    x, y = digits(110)
    arguments = {"epochs": 4, "shuffle": False, "verbose": 2, "validation_data": (x[:30], y[:30])}
    if kind == "dataset":  # each pass over it has another order
        tf.keras.utils.set_random_seed(3)
        data: Any = [(_shuffled(x, y, seed=1),) for _ in range(2)]
        arguments.pop("shuffle")
    else:
        data = [(x, y)] * 2
    _choose(monkeypatch, 2)
    results = []
    for number, each in zip((None, "auto"), data, strict=True):
        model, calls = small_cnn(), _Calls()
        rate = tf.keras.callbacks.LearningRateScheduler(_schedule)
        patience = tf.keras.callbacks.EarlyStopping("loss", patience=5)
        callbacks = [calls, rate, patience]
        history = model.fit(*each, callbacks=callbacks, num_processes=number, **arguments)
        results.append((model, history, calls.said))
        assert model.history is history
    (expected, before, said), (found, after, also) = results
    assert tries == [2]
    assert after.nanotf.size == 2
    assert also == said
    assert after.epoch == before.epoch == [0, 1, 2, 3]
    assert_same_history(after.history, before.history)
    assert_same_state(found, expected)
    lines = capsys.readouterr().out
    assert lines.count("Epoch 2/4") == 2
    assert lines.index("2 workers: ") > lines.rindex("Epoch 1/4")
    (entry,) = choice_cache.entries().values()
    assert [m["num_processes"] for m in entry["measured"]] == [1, 2]
    # Now an earlier call has measured.
    again = found.fit(*each, verbose=2, num_processes="auto")
    assert (again.nanotf.size, tries) == (2, [2])
    assert "; as measured on" in capsys.readouterr().out


def test_a_run_with_checkpoints_is_one_training(
    float64: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, tries: list[int]
) -> None:
    """The first one trains here, even if no checkpoint can be written; the next one measures."""
    x, y = digits(110)
    _choose(monkeypatch, 2)
    stock, failed = store.Folder.write, []

    def write(self: Any, *content: Any) -> None:
        if not failed:
            failed.append(1)
            raise OSError(28, "No space left on device")
        stock(self, *content)

    monkeypatch.setattr(store.Folder, "write", write)
    results = []
    for number, folder in ((None, "a"), ("auto", "b"), ("auto", "c")):
        model, calls, log = small_cnn(), _Calls(), tmp_path / f"{folder}.csv"
        failed.clear()
        history = model.fit(
            *(x, y),
            epochs=3,
            verbose=0,
            callbacks=[calls, tf.keras.callbacks.CSVLogger(log)],
            resume=tmp_path / folder,
            num_processes=number,
        )
        results.append((model, history, calls.said))
        assert [row.split(",")[0] for row in log.read_text().splitlines()[1:]] == ["0", "1", "2"]
    (expected, before, said), *others = results
    assert [history.nanotf.size for _, history, _ in others] == [1, 2]
    assert tries == [2]
    for found, after, also in others:
        assert also == said
        assert_same_history(after.history, before.history)
        assert_same_state(found, expected)


def _never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(*_: Any) -> Any:
        raise AssertionError("what follows cannot be trained by another call")

    monkeypatch.setattr(choice.Auto, "rest", rest)
    _allow(monkeypatch)


class _Stopped(tf.keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise RuntimeError("stopped")


def test_a_restored_model_is_not_handed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Keras would begin the rest where `BackupAndRestore` has begun."""
    _allow(monkeypatch)
    monkeypatch.setattr(choice.Auto, "rest", lambda *_: choice.Choice())
    x, y = digits(60)
    backup = tmp_path / "backup"
    arguments: Any = {"epochs": 5, "batch_size": 20, "verbose": 0}
    with pytest.raises(RuntimeError, match="stopped"):
        small_cnn().fit(x, y, callbacks=[_backup(backup), _Stopped()], **arguments)
    model, calls = small_cnn(), _Calls()
    model.fit(x, y, callbacks=[_backup(backup), calls], num_processes="auto", **arguments)
    assert [said for said in calls.said if "epoch" in said] == ["epoch 2", "epoch 3", "epoch 4"]
    assert int(model.optimizer.iterations) == 15


def _backup(folder: pathlib.Path) -> Any:
    return tf.keras.callbacks.BackupAndRestore(str(folder))


def test_validation_data_of_a_generator_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call would find nothing left, or begin in the middle."""
    _never_left(monkeypatch)
    x, y = digits(40)
    results = []
    for number in (None, "auto"):
        validation = ((a, b) for a, b in [(x, y)])
        arguments: Any = {"epochs": 2, "verbose": 0, "validation_freq": 2}
        model = small_cnn()
        history = model.fit(
            x, y, validation_data=validation, num_processes=number, shuffle=False, **arguments
        )
        results.append({key: len(values) for key, values in history.history.items()})
    assert results[1] == results[0]


class _OwnList(tf.keras.callbacks.CallbackList):  # type: ignore[misc]
    ended = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended += 1
        super().on_epoch_end(epoch, logs)


def test_the_users_callback_list_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _never_left(monkeypatch)
    x, y = digits(40)
    model = small_cnn()
    given = _OwnList(None, add_history=True, model=model, epochs=3)
    history = model.fit(x, y, epochs=3, verbose=2, callbacks=given, num_processes="auto")
    assert given.ended == 3
    assert model.history is history
    assert "one process, not measured: its steps are timed by" in capsys.readouterr().out


def test_data_that_continue_over_epochs_are_not_handed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tries: list[int]
) -> None:
    """The time of their steps is remembered, so that the next call measures before it trains."""
    x, y = digits(110)
    _choose(monkeypatch, 2)
    model = small_cnn()
    arguments: Any = {"epochs": 2, "steps_per_epoch": 3, "verbose": 2, "num_processes": "auto"}
    assert model.fit(x, y, **arguments).nanotf.size == 1
    assert tries == []
    assert "The next such call measures before it trains" in capsys.readouterr().out
    (entry,) = choice_cache.entries().values()
    assert [m["num_processes"] for m in entry["measured"]] == [1]
    assert model.fit(x, y, **arguments).nanotf.size == 2
    assert tries == [2]


class _Scaled(tf.keras.losses.Loss):  # type: ignore[misc]
    def call(self, y: Any, found: Any) -> Any:
        return tf.reduce_mean(tf.square(y - found), axis=-1)


def _sequential(units: int = 3) -> Any:
    model = Sequential([L.Input((4,)), L.Dense(units, "softmax"), L.Softmax(), L.Dense(1)])
    model.compile(tf.keras.optimizers.AdamW(), _Scaled(), metrics=["mae"])
    return model


def _functional(swapped: bool = False) -> Any:
    given = tf.keras.Input((4,))
    inner = tf.keras.Sequential([L.Dense(4), L.Dropout(0.1)])
    x = L.Add()([inner(given), L.Dense(4)(given)]) * 2.0
    model = Model(given, [L.Dense(1)(x), L.Dense(1)(x)])
    one, two = model.output_names
    model.compile("adam", {one: "mae", two: "mse"} if swapped else {one: "mse", two: "mae"})
    return model


class Subclassed(Model):
    def __init__(self, units: int = 3) -> None:
        super().__init__()
        self.hidden, self.out = L.Dense(units), L.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def _subclassed(units: int = 3) -> Any:
    model = Subclassed(units)
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("make", [_sequential, _functional, _subclassed])
def test_a_rebuilt_model_is_remembered(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    tried: list[int] = []

    def measure(trial: Any, number: int, *_: Any) -> Measured:
        tried.append(number)
        return Measured(number, 100.0)

    monkeypatch.setattr(timed_fits, "measure", measure)
    _allow(monkeypatch)
    _choose(monkeypatch, 1)
    x, y = np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32")

    def trials(model: Any) -> int:
        before = len(tried)
        y_or_two = [y, y] if make is _functional else y
        model.fit(x, y_or_two, batch_size=2, epochs=2, verbose=0, num_processes="auto")
        return len(tried) - before

    assert trials(make()) > 0
    assert trials(make()) == trials(make()) == 0
    assert trials(make(5)) > 0, "another model"


def test_a_generator_is_not_tried(
    capsys: pytest.CaptureFixture[str], tries: list[int], float64: None
) -> None:
    x, y = digits(60)

    def batches() -> Iterator[Any]:
        for begin in range(0, 60, 20):
            yield x[begin : begin + 20], y[begin : begin + 20]

    expected, found = small_cnn(), small_cnn()
    before = expected.fit(batches(), verbose=0)
    history = found.fit(batches(), verbose=2, num_processes="auto")
    assert_same_history(history.history, before.history)
    assert tries == []
    assert "one process, not measured: data of class generator" in capsys.readouterr().out


def test_a_dataset_with_python_functions_is_not_tried(
    capsys: pytest.CaptureFixture[str], tries: list[int]
) -> None:
    x, y = digits(40)
    seen = []

    def batches() -> Iterator[Any]:
        seen.append(1)
        yield x, y

    signature = (tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    small_cnn().fit(dataset.repeat(3), epochs=2, verbose=2, num_processes="auto")
    assert tries == []
    assert len(seen) == 6
    assert "one process, not measured: x must not depend on Python" in capsys.readouterr().out


class Closed(tf.keras.Model):  # type: ignore[misc]
    # Its attribute cannot be sent.
    def __init__(self, units: int) -> None:
        super().__init__()
        self.flatten, self.dense = L.Flatten(), L.Dense(units)
        self.connection = socket.socket()

    def call(self, inputs: Any) -> Any:
        return self.dense(self.flatten(inputs))


def test_a_model_that_cannot_be_sent_is_not_tried(
    capsys: pytest.CaptureFixture[str], tries: list[int]
) -> None:
    x, y = digits(40)
    model = nanotf.accelerate(Closed(10))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, epochs=2, verbose=2, num_processes="auto")
    assert len(history.history["loss"]) == 2
    assert tries == []
    assert "one process, not measured: " in capsys.readouterr().out
    model.connection.close()


@pytest.mark.parametrize("error", [nanotf.errors.WorkerError("no memory"), OSError("no memory")])
def test_a_trial_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def measure(trial: Any, number: int, *_: Any) -> Measured:
        raise error

    monkeypatch.setattr(timed_fits, "measure", measure)
    _allow(monkeypatch)
    x, y = digits(80)
    history = small_cnn().fit(x, y, epochs=2, verbose=2, num_processes="auto")
    assert (len(history.history["loss"]), history.nanotf.size) == (2, 1)
    assert f"failed: {type(error).__name__}: no memory" in capsys.readouterr().out
    (entry,) = choice_cache.entries().values()
    assert [m["num_processes"] for m in entry["measured"]] == [1]


def test_a_plan_that_fails_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(*_: Any) -> Any:
        raise nanotf.errors.PlacementError("another pool has taken the cores")

    monkeypatch.setattr(choice.Auto, "_plan", plan)
    monkeypatch.setattr(timed_fits, "expected", lambda one, start_up: 0.0)
    _allow(monkeypatch)
    x, y = digits(80)
    history = small_cnn().fit(x, y, epochs=3, verbose=0, num_processes="auto")
    assert (len(history.history["loss"]), history.nanotf.size) == (3, 1)
    (record,) = [r for r in caplog.records if "could not choose" in r.message]
    assert "PlacementError: another pool has taken the cores" in record.message


def test_a_trial_skipped_for_lack_of_time_runs_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried, now = [], [0.0]

    def measure(trial: Any, number: int, *_: Any) -> Measured:
        tried.append(number)
        now[0] += 6.0
        return Measured(number, 100.0)

    monkeypatch.setattr(candidates, "numbers", lambda *_: [1, 2, 4])
    monkeypatch.setattr(choice.Auto, "_plan", lambda *_: nanotf.plan(1))
    monkeypatch.setattr(timed_fits, "measure", measure)
    monkeypatch.setattr(timed_fits, "expected", lambda one, start_up: 5.0)
    monkeypatch.setattr(timed_fits, "_now", lambda: now[0])
    monkeypatch.setattr(first_epochs, "MEASURED_STEPS", 1)
    monkeypatch.setattr(rule, "allowed", lambda saving: 10.0)
    x, y = digits(80)
    model = small_cnn()
    model.fit(x, y, epochs=2, verbose=2, num_processes="auto")
    assert tried == [2], "4 s are left, and 4 workers take 5 s"
    assert "(4: not tried: no time left)" in capsys.readouterr().out
    model.fit(x, y, epochs=2, verbose=0, num_processes="auto")
    assert tried == [2, 4]
    assert capsys.readouterr().out == ""  # verbose=0


def test_warm_workers_need_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [Measured(1, 0.02), Measured(2, 0.01, start_up=100.0)]
    monkeypatch.setattr(choice.Auto, "_known", lambda *_: {m.num_processes: m for m in measured})
    monkeypatch.setattr(choice.Auto, "_date", "that day", raising=False)
    x, y = digits(40)
    auto = choice.Auto(small_cnn(), {"x": x, "y": y, "verbose": 0}, Where.of())
    monkeypatch.setattr(choice_cache, "entries", lambda: {"any": {"measured": [], "date": ""}})
    # 40 s in one process, 20 s with workers
    data: Any = SimpleNamespace(steps=2000, train=None, specs=None)
    for is_there, number in ((False, 1), (True, 2)):
        monkeypatch.setattr(choice.Auto, "_is_warm", lambda *_, is_there=is_there: is_there)
        assert auto.at_once(data) == choice.Choice(number)


def test_a_pool_is_warm_for_its_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nanotf.plan(1), nanotf.plan(2)
    warm.end_pool()
    assert not warm.is_warm(one, "shm")
    alive = [True]
    pool = SimpleNamespace(
        owner=os.getpid(), plan=one, transport="shm", is_alive=lambda: alive.pop()
    )
    with monkeypatch.context() as patch:
        patch.setattr(warm, "_pool", pool)
        assert not warm.is_warm(two, "shm")
        assert not warm.is_warm(one, "grpc")
        with warm._lock, ThreadPoolExecutor() as threads:
            assert not threads.submit(warm.is_warm, one, "shm").result(), "it may be in use"
        assert warm.is_warm(one, "shm")
        alive.append(False)
        assert not warm.is_warm(one, "shm")
        pool.owner = -1
        assert not warm.is_warm(one, "shm")


def test_without_data_it_is_plain_keras(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_cnn()
    with pytest.raises(Exception) as before:
        model.fit(verbose=2)
    with pytest.raises(type(before.value)) as after:
        model.fit(verbose=2, num_processes="auto")
    assert str(after.value) == str(before.value)
    assert "one process, not measured: there are no data." in capsys.readouterr().out


# ------------------------------------------------------------------------- a bounded trial
def _for_ever(x: Any) -> Any:
    """Runs a step that does not end."""
    return x + tf.while_loop(lambda n: n >= 0.0, lambda n: (tf.sin(n) + 1.0,), [x[0, 0] ** 2])[0]


class EndlessInWorkers(L.Layer):  # type: ignore[misc]
    """Ends only in the user's process."""

    def call(self, x: Any) -> Any:
        return _for_ever(x) if "NANOTF_RANK" in os.environ else x


@pytest.mark.thorough
def test_a_trial_that_is_too_slow_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = digits(110)
    now, idle = [0.0], [40.0]

    def on_idle(self: Any, ended: set[int]) -> None:
        now[0] += idle[0]
        self._check_time()

    monkeypatch.setattr(timed_fits, "_now", lambda: now[0])
    monkeypatch.setattr(timed_fits.TimedFit, "on_idle", on_idle)
    monkeypatch.setattr(timed_fits, "expected", lambda one, start_up: 5.0)
    monkeypatch.setattr(first_epochs, "MEASURED_STEPS", 1)
    monkeypatch.setattr(rule, "allowed", lambda saving: 100.0)

    def make() -> Any:
        tf.keras.utils.set_random_seed(5)
        model = Sequential(
            [
                L.Input((8, 8, 1)),
                L.Flatten(),
                EndlessInWorkers(),
                L.Dropout(0.1),
                L.Dense(10),
            ]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss)
        return model

    results = []
    for number in (None, "auto"):
        model = make()
        for _ in range(2):
            history = model.fit(x, y, epochs=2, verbose=2, num_processes=number)
        results.append((model, history.history, float(tf.random.uniform([]))))
    (expected, before, next_number), (found, after, also) = results
    assert_same_history(after, before)
    assert_same_state(found, expected)
    assert also == next_number
    assert "too slow: stopped after" in capsys.readouterr().out
    assert not nanotf.worker_pids()
    (entry,) = choice_cache.entries().values()
    assert [m["step"] is None for m in entry["measured"]] == [False, True]
    assert now[0] > 100.0


@pytest.mark.thorough
def test_a_stopped_trial_may_be_worth_more_time(
    monkeypatch: pytest.MonkeyPatch, tries: list[int]
) -> None:
    stopped = Measured(2, None, 3.0, "too slow", stopped=15.0)
    monkeypatch.setattr(choice.Auto, "_known", lambda *_: {2: stopped})
    monkeypatch.setattr(choice.Auto, "_date", "that day", raising=False)
    monkeypatch.setattr(timed_fits, "expected", lambda one, start_up: 5.0)
    x, y = digits(80)
    for allowed, tried in ((25.0, []), (1000.0, [2])):
        monkeypatch.setattr(rule, "allowed", lambda saving, allowed=allowed: allowed)
        small_cnn().fit(x, y, epochs=2, verbose=0, num_processes="auto")
        assert tries == tried


def test_a_start_that_takes_too_long_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over, ended = threading.Event(), threading.Event()

    def start(*_: Any) -> Any:
        assert is_over.wait(60)
        raise nanotf.errors.WorkerError("too late")

    warm.end_pool()
    monkeypatch.setattr(warm, "_start", start)
    monkeypatch.setattr(warm, "shutdown", ended.set)
    monkeypatch.setattr(timed_fits, "expected", lambda one, start_up: -1e6)
    monkeypatch.setattr(first_epochs, "MEASURED_STEPS", 1)
    monkeypatch.setattr(rule, "allowed", lambda saving: 0.01)
    x, y = digits(80)
    history = small_cnn().fit(x, y, epochs=2, verbose=2, num_processes="auto")
    assert (len(history.history["loss"]), history.nanotf.size) == (2, 1)
    assert "(2: not ready after" in capsys.readouterr().out
    assert not ended.is_set()
    is_over.set()
    assert ended.wait(60), "what has started ends in the background"


@pytest.mark.thorough
def test_workers_that_do_not_start_decide_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handshake, "START_SECONDS", 0.0)
    _allow(monkeypatch)
    nanotf.shutdown()
    x, y = digits(80)
    history = small_cnn().fit(x, y, epochs=2, verbose=2, num_processes="auto")
    assert len(history.history["loss"]) == 2
    assert "(2: failed: WorkerError" in capsys.readouterr().out
    assert not nanotf.worker_pids()


@pytest.mark.thorough
def test_a_measurement_that_is_cut_short_counts(
    monkeypatch: pytest.MonkeyPatch, tries: list[int]
) -> None:
    def run(self: Any, workers: Any) -> Any:
        if self.epochs == 1:  # the second part of a trial
            raise timed_fits.OutOfTime("enough")
        return stock(self, workers)

    stock = timed_fits.TimedFit.run
    monkeypatch.setattr(timed_fits.TimedFit, "run", run)
    monkeypatch.setattr(timed_fits, "MEASURED_SECONDS", 1000.0)
    _choose(monkeypatch, 1)
    x, y = digits(80)
    small_cnn().fit(x, y, epochs=2, verbose=0, num_processes="auto")
    assert tries == [2]


# ------------------------------------------------------------------------------ bad input
def test_wrong_arguments(tries: list[int]) -> None:
    x, y = digits(20)
    model = small_cnn()
    with pytest.raises(InvalidArgumentTypeError, match="num_processes='fastest'"):
        model.fit(x, y, num_processes="fastest")
    with pytest.raises(InvalidArgumentError, match="transport='tcp'"):
        model.fit(x, y, num_processes="auto", transport="tcp")
    with pytest.raises(TypeError, match="nonsense"):
        model.fit(x, y, num_processes="auto", nonsense=1)
    uncompiled = Sequential([L.Dense(1)])
    with pytest.raises(Exception, match="compile"):
        uncompiled.fit(x, y, num_processes="auto")
    assert tries == []
