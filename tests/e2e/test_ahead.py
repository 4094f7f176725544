"""Runs the steps of `fit` ahead of Keras's loop."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from nanotf.compat import run_ahead
from nanotf.compat.run_ahead import RunAhead
from nanotf.errors import UndividedError
from nanotf.shipping.data.streams import Coming


class Numbers(Coming):
    """Tells which of the numbers 1 to `size` come whole."""

    def __init__(self, size: int, whole: int) -> None:
        kinds = [number % whole == 0 for number in range(1, size + 1)]
        self._left = iter([*kinds, None])

    def is_whole(self, iterator: Any) -> bool | None:
        return next(self._left)


class Loop:
    """Keras's loop over the numbers 1 to `size`; each step returns the sum so far.

    Args:
        size: int.
        result: callable of a number that replaces the step.
        whole: int; a batch comes without rows if its number is a multiple.
        tells: bool, whether such a batch is a whole one.
    """

    def __init__(
        self, size: int, result: Any = None, whole: int = 10**6, tells: bool = True
    ) -> None:
        self.ahead = RunAhead()
        self.sum = tf.Variable(0)
        self.executions: list[int] = []
        self.traces: list[bool] = []  # of steps, whether their batch is whole
        self.refused: list[Exception] = []

        def batch(number: Any) -> Any:
            extent = tf.zeros([tf.cast(number % whole != 0, tf.int32), 0], bool)
            return tf.cast(number, tf.int32), tf.ensure_shape(extent, [None, 0])

        def step(data: Any) -> Any:
            number, extent = data
            self.traces.append(extent.shape[0] == 0)
            return (result or self._step)(number)

        self.iterator = iter(tf.data.Dataset.range(1, size + 1).map(batch))
        if whole <= size and tells:
            self.ahead.begin(Numbers(size, whole), self.refused.append)
        execute = self.ahead.executes(step)

        def noting(iterator: Any) -> Any:
            found = execute(iterator)
            self.executions.append(self.ahead.count)
            return found

        self._answer = self.ahead.answers(noting)

    def _step(self, number: Any) -> Any:
        return {"sum": self.sum.assign_add(number)}

    def run(self, steps: int) -> Any:
        """Returns the result of the last of `steps` steps."""
        for _ in range(steps):
            found = self._answer(self.iterator)
        return found


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every step count as fast, however busy the machine is."""
    monkeypatch.setattr(run_ahead, "MOST_SECONDS", 1e6)


def test_every_step_is_made_once_and_none_of_the_next_epoch() -> None:
    loop = Loop(1000)
    loop.ahead.begin_epoch(100, 900)
    assert int(loop.run(100)["sum"]) == 5050
    assert int(loop.sum) == 5050
    assert sum(loop.executions) == 100
    assert loop.executions[: run_ahead.STEPS_BEFORE] == [1] * run_ahead.STEPS_BEFORE
    assert max(loop.executions) == run_ahead.MOST_STEPS
    loop.ahead.begin_epoch(3, 0)
    assert int(loop.run(3)["sum"]) == 5050 + 101 + 102 + 103
    assert loop.executions[-1] == 3


def test_data_that_end_early() -> None:
    loop = Loop(30)
    loop.ahead.begin_epoch(1000, 0)
    assert int(loop.run(30)["sum"]) == 465
    with pytest.raises(tf.errors.OutOfRangeError):
        loop.run(1)
    assert int(loop.sum) == 465


@pytest.mark.parametrize(("left", "to_come"), [(None, None), (100, 0)])
def test_one_step_at_a_time(left: int | None, to_come: int | None) -> None:
    """Steps run one at a time if callbacks run between them, or if few are left."""
    loop = Loop(1000)
    loop.ahead.begin_epoch(left, to_come)
    loop.run(100)
    assert set(loop.executions) == {1}


def test_a_short_fit_after_a_long_one() -> None:
    """The graph exists already."""
    loop = Loop(2000)
    loop.ahead.begin_epoch(500, 0)
    loop.run(500)
    loop.ahead.begin_epoch(20, 0)
    assert int(loop.run(20)["sum"]) == 520 * 521 // 2
    assert loop.executions[-2:] == [16, 4]


def test_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "MOST_SECONDS", 1e-9)
    loop = Loop(1000)
    loop.ahead.begin_epoch(500, 0)
    loop.run(100)
    assert set(loop.executions) == {1}


def test_results_that_may_differ_in_shape() -> None:
    loop = Loop(1000, lambda number: {"numbers": tf.range(number)})
    loop.ahead.begin_epoch(500, 0)
    assert loop.run(40)["numbers"].shape == (40,)
    assert set(loop.executions) == {1}


def test_random_numbers_of_a_state_kept_by_the_operation() -> None:
    """Two graphs would draw the same numbers twice."""

    @tf.function
    def drawn() -> Any:
        return {"number": tf.random.uniform([], seed=3)}

    loop = Loop(1000, lambda _: drawn())
    loop.ahead.begin_epoch(500, 0)
    loop.run(40)
    assert set(loop.executions) == {1}


@pytest.mark.parametrize("whole", [1, 5, 7, 16, 50])
def test_whole_batches(whole: int) -> None:
    """They have a graph of their own, and the steps between run ahead."""
    loop = Loop(500, whole=whole)
    loop.ahead.begin_epoch(500, 0)
    assert int(loop.run(500)["sum"]) == 500 * 501 // 2
    assert sum(loop.executions) == 500
    assert max(loop.executions) == min(whole, run_ahead.MOST_STEPS)
    with pytest.raises(tf.errors.OutOfRangeError):
        loop.run(1)
    assert loop.traces.count(True) == 1
    assert (False in loop.traces) == (whole > 1)


def test_batches_without_rows() -> None:
    """They take the graph of all batches if no batch of the data comes whole."""
    loop = Loop(500, whole=30, tells=False)
    loop.ahead.begin_epoch(500, 0)
    assert int(loop.run(500)["sum"]) == 500 * 501 // 2
    assert max(loop.executions) > 1
    assert True not in loop.traces


def test_the_graph_that_runs_at_the_end_of_the_data() -> None:
    """It is that of the last step: Keras has only one, whose counters count once more there."""
    count = tf.Variable(0)
    loop = Loop(20, lambda _: {"count": count.assign_add(1)}, whole=1)
    loop.run(20)
    with pytest.raises(tf.errors.OutOfRangeError):
        loop.run(1)
    assert set(loop.traces) == {True}
    assert int(count) == 21


@pytest.mark.parametrize("whole", [3, 20])
def test_random_numbers_of_two_graphs(whole: int) -> None:
    loop = Loop(20, lambda _: {"number": tf.random.uniform([], seed=3)}, whole)
    loop.run(whole - 1)
    with pytest.raises(StopIteration):
        loop.run(1)
    assert isinstance(loop.refused[0], UndividedError)
    loop.ahead.begin(Numbers(20, 1), loop.refused.append)  # the next fit has both graphs
    with pytest.raises(StopIteration):
        loop.run(1)
