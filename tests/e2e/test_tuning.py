"""`num_processes="auto"`: what it chooses, and that trials leave no trace."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, small_cnn

import nanotf
from nanotf import tuning, tuning_cache
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.keras import Sequential
from nanotf.topology import LogicalCpu, Machine
from nanotf.tuning import Measured, candidates, decide

L = tf.keras.layers


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that are tried; time for all of them, however busy the machine is."""
    found: list[int] = []
    stock = tuning._measure

    def measure(trial: Any, number: int, *args: Any) -> Measured:
        found.append(number)
        measured = stock(trial, number, *args)
        assert measured.step is not None and measured.step > 0
        return Measured(number, measured.step, start_up=0.0)

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 1000.0)
    monkeypatch.setattr(tuning, "MEASURED_SECONDS", 0.1)
    return found


def _choose(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(tuning, "decide", lambda measured, steps: number)


# ------------------------------------------------------------------------------ decisions
def test_the_fastest_that_is_worth_it() -> None:
    one, two, four = Measured(1, 0.100, 5.0), Measured(2, 0.060, 6.0), Measured(4, 0.050, 8.0)
    assert decide([one, two, four], steps=10_000) == 4
    assert decide([one, two, four], steps=180) == 2  # 18 s; 6 + 10.8 s; 8 + 9 s
    assert decide([one, two, four], steps=100) == 1  # the start of workers takes what they gain
    assert decide([one, two, four], steps=None) == 4
    assert decide([one, Measured(2, 0.097)], steps=None) == 1  # no clear gain
    assert decide([one, Measured(2, None, note="not tried")], steps=None) == 1
    assert decide([Measured(1, None, note="failed"), two], steps=None) == 1


def test_candidates_respect_numa_nodes() -> None:
    two_by_six = Machine(tuple(LogicalCpu(n, n, numa_node=n // 6) for n in range(12)))
    plans = candidates(machine=two_by_six)
    assert list(plans) == [1, 2, 4, 8]
    assert plans[1].cores() == tuple(range(12))
    for number in (2, 4):
        assert all(p.numa_node is not None for p in plans[number].placements)
    assert list(candidates(4, machine=two_by_six)) == [1, 2]
    assert list(candidates(machine=Machine((LogicalCpu(0, 0),)))) == [1]


def test_one_core(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plans = {1: nanotf.plan(1)}
    monkeypatch.setattr(tuning, "candidates", lambda *_: plans)
    x, y = digits(20)
    history = small_cnn().fit(x, y, verbose=2, num_processes="auto")
    assert history.nanotf is None
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


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_one_process_is_as_without(
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
        # Twice: what the trial leaves behind might show late.
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
    assert "1, by what was measured on" in said
    assert nanotf.last_report() is last  # not that of a trial


def test_two_processes_are_as_without(
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
    (entry,) = tuning_cache.entries().values()
    assert [m["num_processes"] for m in entry["measured"]] == [1, 2]


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
    # Not nanotf's, and without get_config: nothing says how to make it again.
    def __init__(self, units: int) -> None:
        super().__init__()
        self.flatten, self.dense = L.Flatten(), L.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.dense(self.flatten(inputs))

    def get_config(self) -> Any:
        raise NotImplementedError("no configuration")


def test_a_model_that_workers_cannot_have_is_not_tried(
    capsys: pytest.CaptureFixture[str], tries: list[int]
) -> None:
    x, y = digits(40)
    model = nanotf.accelerate(Closed(10))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert len(model.fit(x, y, verbose=2, num_processes="auto").history["loss"]) == 1
    assert tries == []
    assert "no trial, 1 process: " in capsys.readouterr().out


def test_a_trial_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(trial: Any, number: int, *_: Any) -> Measured:
        if number > 1:
            raise nanotf.errors.WorkerError("no memory")
        return Measured(1, 100.0)

    monkeypatch.setattr(tuning, "_measure", measure)
    x, y = digits(40)
    small_cnn().fit(x, y, verbose=2, num_processes="auto")
    assert "failed: WorkerError: no memory" in capsys.readouterr().out


def test_no_time_left_is_made_up_for_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def measure(trial: Any, number: int, *_: Any) -> Measured:
        tried.append(number)
        return Measured(number, 100.0)

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", -1.0)
    monkeypatch.setattr(tuning, "TRIAL_SHARE", 0.0)
    x, y = digits(40)
    model = small_cnn()
    model.fit(x, y, verbose=2, num_processes="auto")
    assert tried == [1]
    assert "not tried: no time left" in capsys.readouterr().out
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 1000.0)
    model.fit(x, y, verbose=0, num_processes="auto")
    assert tried == [1, 2]
    assert capsys.readouterr().out == ""  # verbose=0


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
