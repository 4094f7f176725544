"""`num_processes="auto"`: its choices, and trials that leave no traces."""

from __future__ import annotations

import os
import pathlib
import random
import socket
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
from nanotf.parent.auto import candidates, choice, choice_cache, timed_fits
from nanotf.parent.auto.choice import decide
from nanotf.parent.auto.timed_fits import Measured
from nanotf.parent.where import Where
from nanotf.pool import pool, warm

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
    """Records the tried numbers; leaves time for all, however busy the machine is."""
    found: list[int] = []
    stock = timed_fits.measure

    def measure(trial: Any, number: int, *args: Any) -> Measured:
        found.append(number)
        measured = stock(trial, number, *args)
        assert measured.step is not None and measured.step > 0
        return Measured(number, measured.step, start_up=0.0)

    monkeypatch.setattr(timed_fits, "measure", measure)
    monkeypatch.setattr(timed_fits, "TRIAL_SECONDS", 1000.0)
    monkeypatch.setattr(timed_fits, "MEASURED_SECONDS", 0.1)
    monkeypatch.setattr(timed_fits, "START_UP", 0.0)  # the jobs here are short
    return found


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


def test_one_core(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plans = {1: nanotf.plan(1)}
    monkeypatch.setattr(candidates, "candidates", lambda *_: plans)
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


def _shuffled(x: Any, y: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100).batch(20)


@pytest.mark.thorough
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
            history = model.fit(*data, epochs=2, verbose=2, callbacks=[calls], num_processes=number)
        results.append((model, history.history, calls.said, _random_numbers()))
    (expected, *alike), (found, *also) = results
    assert_same_history(also[0], alike[0])
    assert also[1:] == alike[1:]
    assert_same_state(found, expected)
    assert tries == [1, 2]  # the second call remembers
    said = capsys.readouterr().out
    assert "1, measured in" in said
    assert "ms per step" in said
    assert "1, as measured on" in said
    assert nanotf.last_report() is last  # not a trial's


def test_two_processes_leave_no_trace(
    float64: None, monkeypatch: pytest.MonkeyPatch, tries: list[int]
) -> None:
    x, y = digits(110)
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x[:30], y[:30])}
    expected, found = small_cnn(), small_cnn()
    _choose(monkeypatch, 2)
    calls, also = _Calls(), _Calls()
    before = expected.fit(x, y, callbacks=[calls], **arguments)
    history = found.fit(x, y, callbacks=[also], num_processes="auto", **arguments)
    assert tries == [1, 2]
    assert history.nanotf.size == 2
    assert also.said == calls.said
    assert_same_history(history.history, before.history)
    assert_same_state(found, expected)
    (entry,) = choice_cache.entries().values()
    assert [m["num_processes"] for m in entry["measured"]] == [1, 2]


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
    _choose(monkeypatch, 1)
    x, y = np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32")

    def trials(model: Any) -> int:
        before = len(tried)
        given = {"x": x, "y": [y, y] if make is _functional else y, "verbose": 0}
        assert choice.choose(model, given, Where.of()) == 1
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
    assert "no trial, 1 process: data of class generator" in capsys.readouterr().out


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
    small_cnn().fit(dataset, verbose=2, num_processes="auto")
    assert tries == []
    assert len(seen) == 1
    assert "no trial, 1 process: x must not depend on Python" in capsys.readouterr().out


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
    assert len(model.fit(x, y, verbose=2, num_processes="auto").history["loss"]) == 1
    assert tries == []
    assert "no trial, 1 process: " in capsys.readouterr().out
    model.connection.close()


def test_a_trial_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(trial: Any, number: int, *_: Any) -> Measured:
        if number > 1:
            raise nanotf.errors.WorkerError("no memory")
        return Measured(1, 100.0)

    monkeypatch.setattr(timed_fits, "measure", measure)
    x, y = digits(40)
    small_cnn().fit(x, y, verbose=2, num_processes="auto")
    assert "failed: WorkerError: no memory" in capsys.readouterr().out
    assert choice_cache.entries() == {}, "nothing was decided"


def test_a_trial_skipped_for_lack_of_time_runs_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def measure(trial: Any, number: int, *_: Any) -> Measured:
        tried.append(number)
        return Measured(number, 100.0)

    plans = dict.fromkeys((1, 2, 4), nanotf.plan(1))
    monkeypatch.setattr(candidates, "candidates", lambda *_: plans)
    monkeypatch.setattr(warm, "is_warm", lambda *_: False)
    monkeypatch.setattr(timed_fits, "measure", measure)
    monkeypatch.setattr(timed_fits, "TRIAL_SECONDS", -1.0)
    monkeypatch.setattr(timed_fits, "TRIAL_SHARE", 0.0)
    monkeypatch.setattr(timed_fits, "PATIENCE", 0.0)
    monkeypatch.setattr(timed_fits, "START_UP", 0.0)
    _choose(monkeypatch, 1)
    x, y = digits(40)
    model = small_cnn()
    model.fit(x, y, verbose=2, num_processes="auto")
    assert tried == [1, 2], "fewer decide nothing"
    assert "(4: not tried: no time left)" in capsys.readouterr().out
    monkeypatch.setattr(timed_fits, "TRIAL_SECONDS", 1000.0)
    model.fit(x, y, verbose=0, num_processes="auto")
    assert tried == [1, 2, 4]
    assert capsys.readouterr().out == ""  # verbose=0


def test_warm_workers_need_no_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {number: nanotf.plan(number) for number in (1, 2)}
    is_there = False
    tried: list[int] = []

    def measure(trial: Any, number: int, *_: Any) -> Measured:
        tried.append(number)
        return Measured(number, 1.0 / number, start_up=0.0)  # workers that are already warm

    monkeypatch.setattr(candidates, "candidates", lambda *_: plans)
    monkeypatch.setattr(timed_fits, "measure", measure)
    monkeypatch.setattr(timed_fits, "START_UP", 100.0)
    monkeypatch.setattr(warm, "is_warm", lambda plan, _: is_there and plan == plans[2])
    x, y = digits(40)
    model, given = small_cnn(), {"x": x, "y": y, "batch_size": 1, "verbose": 2}  # a fit of 40 s
    assert choice.choose(model, given, Where.of()) == 1
    assert "not tried: this fit takes less time than starting workers" in capsys.readouterr().out
    is_there = True
    assert choice.choose(model, given, Where.of()) == 1, "the trial ended the workers"
    assert choice.choose(model, given, Where.of()) == 2
    is_there = False
    assert choice.choose(model, given, Where.of()) == 1
    assert tried == [1, 1, 2], "one alone decides nothing, and is measured again"


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
    assert "no trial, 1 process: there are no data." in capsys.readouterr().out


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
    now = [0.0]

    def on_idle(self: Any, ended: set[int]) -> None:
        now[0] += 40.0
        self._check_time()

    monkeypatch.setattr(timed_fits, "_now", lambda: now[0])
    monkeypatch.setattr(timed_fits.TimedFit, "on_idle", on_idle)
    monkeypatch.setattr(timed_fits, "TRIAL_SECONDS", 100.0)
    monkeypatch.setattr(timed_fits, "START_UP", 0.0)
    tried: list[int] = []
    stock = timed_fits.measure

    def measure(trial: Any, number: int, *args: Any) -> Measured:
        tried.append(number)
        found = stock(trial, number, *args)
        # Whatever the trial took, the fit is worth two processes, and 5 % of it is little.
        return found if found.step is None else Measured(1, 0.1)

    monkeypatch.setattr(timed_fits, "measure", measure)

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
    assert tried == [1, 2, 1, 2], "an undecided measurement is not remembered"
    assert "too slow: stopped after" in capsys.readouterr().out
    assert not nanotf.worker_pids()
    assert choice_cache.entries() == {}
    assert now[0] > 100.0


def test_a_stopped_trial_may_be_worth_more_time() -> None:
    one, two = Measured(1, 0.5), Measured(2, None, 3.0, "too slow", stopped=15.0)
    known = {1: one, 2: two}
    for steps, is_worth in ((None, False), (1000, False), (2000, True)):  # 25 s, 50 s
        assert timed_fits.Budget(steps).is_worth_more(two, known) == is_worth
        assert not timed_fits.Budget(steps).is_worth_more(one, known)
    assert not timed_fits.Budget(2000).is_worth_more(Measured(1, None, stopped=15.0), {})


@pytest.mark.thorough
def test_the_start_of_workers_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stock = [0.0], warm._start

    def start(*args: Any) -> Any:
        now[0] += 1e6  # the first import from a cold disk, on a busy machine
        return stock(*args)

    monkeypatch.setattr(warm, "_start", start)
    monkeypatch.setattr(timed_fits, "_now", lambda: now[0])
    monkeypatch.setattr(timed_fits, "START_UP", 0.0)  # the job is short
    nanotf.shutdown()
    x, y = digits(40)
    small_cnn().fit(x, y, verbose=0, num_processes="auto")
    (entry,) = choice_cache.entries().values()
    assert [m["num_processes"] for m in entry["measured"] if m["step"] is not None] == [1, 2]
    assert now[0] == 1e6, "workers started once, for the trial"


@pytest.mark.thorough
def test_workers_that_do_not_start_decide_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    monkeypatch.setattr(timed_fits, "START_UP", 0.0)
    nanotf.shutdown()
    x, y = digits(40)
    assert len(small_cnn().fit(x, y, verbose=2, num_processes="auto").history["loss"]) == 1
    assert "2   failed: WorkerError" in capsys.readouterr().out
    assert choice_cache.entries() == {}
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
    x, y = digits(40)
    small_cnn().fit(x, y, verbose=0, num_processes="auto")
    assert tries == [1, 2]


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
