"""The warning where several partitions are slower than one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nanotf import console
from nanotf.sagemaker.smp import advice, runtime
from nanotf.sagemaker.smp.times import Execution, Interval

MS = 1_000_000


@pytest.fixture(autouse=True)
def _begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime._here, "config", None)
    monkeypatch.setattr(console.lines, "_warned", set())
    runtime.init({"partitions": 1, "microbatches": 1})
    yield


@dataclass
class Clock:
    """Stands where a step's `Times` do: each execution takes 10 ms and computes for 3."""

    executions: int = 0

    def begins(self) -> None:
        self.executions += 1

    def last(self) -> Any:
        class Computed(Execution):
            computed = 3 * MS

        begin = 20 * MS * self.executions
        return Computed(self.executions, Interval(begin, begin + 10 * MS), (), ())


def _run(other_computes: int, caplog: pytest.LogCaptureFixture) -> tuple[list[Any], str]:
    sent = []

    def gather(tag: str, array: Any) -> list[Any]:
        sent.append((tag, array))
        other = array.copy()
        other[:, 0] += 1 * MS  # it comes later, and ends as late
        other[:, 2] = other_computes
        return [array, other]

    for number in range(2):  # two traces of a step
        watch = advice.SpeedComparison(f"step{number}", Clock(), gather)  # type: ignore[arg-type]
        for _ in range(advice.SKIPPED + advice.SAMPLES + 5):
            watch.begins()
    return sent, caplog.text


def test_one_warning_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    sent, text = _run(5 * MS, caplog)
    assert [tag for tag, _ in sent] == ["step0.times", "step1.times"]  # one exchange per trace
    assert sent[0][1].shape == (advice.SAMPLES, 3)
    assert text.count("slower than 1 would be") == 1
    assert "takes 9.00 ms" in text  # from when both were there
    assert "3.00 + 5.00 = 8.00 ms" in text
    assert "Use partitions=1" in text
    assert "several microbatches" in text


def test_no_warning_where_partitions_compute_at_the_same_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, text = _run(7 * MS, caplog)
    assert text == ""


def test_most_steps_must_be_slower() -> None:
    steps = np.array([[0, 10, 3], [20, 30, 3], [40, 50, 3]])
    steps[1, 1] = 25  # in this one, 5 < 3 + 3
    assert advice.comparison([steps, steps]) is not None
    steps[2, 1] = 45
    assert advice.comparison([steps, steps]) is None
