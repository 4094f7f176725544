"""Warns where several partitions are slower than one process would be.

A process that holds the whole model computes all parts of a step, one after the other, and no more.
So if a step takes longer than all partitions together compute, one process is faster: it does not
wait for messages. This compares measured times of some steps. It says nothing where partitions are
faster than one process would be on the cores of one, though one process would have the cores of
all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanotf.console import warn_once
from nanotf.sagemaker.smp import runtime
from nanotf.sagemaker.smp.times import StepTimes

SKIPPED = 3  # steps: the first ones allocate memory, and compare their data
SAMPLES = 5  # steps after those

Array = np.ndarray[Any, Any]


class SpeedComparison:
    """Begins the executions of a traced step, and compares some of the first.

    All partitions make the same calls.

    Args:
        tag: unique to the step and the same in all partitions.
        times: those of the step.
        gather: takes a tag and an array, and returns the array of each partition.
    """

    def __init__(
        self, tag: str, times: StepTimes, gather: Callable[[str, Array], Sequence[Array]]
    ) -> None:
        self._tag, self._times, self._gather = f"{tag}.times", times, gather
        self._samples: list[tuple[int, int, int]] = []  # a row per step, see `comparison`

    def begins(self) -> None:
        """Begins an execution."""
        ended = self._times.executions
        if SKIPPED < ended <= SKIPPED + SAMPLES:
            last = self._times.last()
            self._samples.append((*last.whole, last.computed))
            if len(self._samples) == SAMPLES:
                found = self._gather(self._tag, np.array(self._samples))
                if runtime.rank() == 0:  # of all copies, one tells
                    _warn(found, runtime.num_microbatches())
        self._times.begins()


def comparison(samples: Sequence[Array]) -> tuple[float, list[float]] | None:
    """Compares steps with what one process needs at most.

    Args:
        samples: of each partition, an array of a row per step: begin, end and the time in which
            the partition computed, in nanoseconds.

    Returns:
        None unless most steps took longer than all partitions computed. Else the milliseconds of
        the step with the median difference, and those for which each partition computed.
    """
    rows = np.stack(samples)
    # From when all partitions were there, so that what a script does between steps does not count.
    steps = rows[:, :, 1].max(axis=0) - rows[:, :, 0].max(axis=0)
    computed = rows[:, :, 2]
    differences = steps - computed.sum(axis=0)
    median = np.argsort(differences)[len(differences) // 2]
    if differences[median] <= 0:
        return None
    return float(steps[median]) / 1e6, [float(part) / 1e6 for part in computed[:, median]]


def _warn(samples: Sequence[Array], microbatches: int) -> None:
    found = comparison(samples)
    if found is None:
        return
    step, parts = found
    remedy = "Use partitions=1 if the model's weights and slots fit one process"
    if microbatches == 1:
        remedy += ", or several microbatches, so that partitions compute at the same time"
    warn_once(
        "%d partitions are slower than 1 would be. Without the optimizer's update, a step takes "
        "%.2f ms. Its parts compute for %s = %.2f ms, and one process has no more to compute. %s.",
        len(parts),
        step,
        " + ".join(f"{part:.2f}" for part in parts),
        sum(parts),
        remedy,
    )
