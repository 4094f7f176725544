"""Computes a block's times from the events of a contestant's clock: plain arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Block:
    """Times of one block of one contestant, in seconds; None where unknown.

    Args:
        step: of a training step at its steady rate.
        processor: processor time of a step, the mean over the processes that compute.
        epoch: of a whole epoch, from the end of one to the end of the next.
        boundary: between epochs, beyond the steps.
        first_batch: from the call to the end of the first step.
        call: of the whole call.
    """

    step: float | None = None
    processor: float | None = None
    epoch: float | None = None
    boundary: float | None = None
    first_batch: float | None = None
    call: float | None = None


def read(noted: dict[str, Any], steps: int) -> Block:
    """Returns the block of a contestant that has a clock.

    Args:
        noted: dict with `call` and `done` (float, seconds), `ends` (list of float) and `steps`
            (list of `[epoch, step, seconds, processor time or None]`).
        steps: int, of an epoch.
    """
    ends = noted["ends"]
    # Keras numbers the last of several steps at once as if all of them had data.
    epochs = [
        [[min(step, steps - 1), *times] for of, step, *times in noted["steps"] if of == epoch]
        for epoch in range(len(ends))
    ]
    step, processor = _per_step(epochs, 1), _per_step(epochs, 2)
    intervals = [later - sooner for sooner, later in itertools.pairwise(ends)]
    first_batch = noted["steps"][0][2] - noted["call"] if noted["steps"] else None
    return Block(
        step,
        processor,
        statistics.fmean(intervals) if intervals else None,
        None if step is None else _boundary(epochs, steps, step),
        first_batch,
        noted["done"] - noted["call"],
    )


def _per_step(epochs: Sequence[Sequence[Any]], clock: int) -> float | None:
    """Returns seconds of a clock per step, from an epoch's first reported step to its last."""
    ends = [(epoch[0], epoch[-1]) for epoch in epochs if epoch]
    count = sum(last[0] - first[0] for first, last in ends)
    if not count or any(None in (first[clock], last[clock]) for first, last in ends):
        return None
    return float(sum(last[clock] - first[clock] for first, last in ends) / count)


def _boundary(epochs: Sequence[Sequence[Any]], steps: int, step: float) -> float | None:
    """Returns seconds from an epoch's last step to the end of the next first step, less that step.

    If the last step was not reported, the time since the last reported one counts as steps.
    """
    gaps = [
        later[0][1] - sooner[-1][1] - (steps - sooner[-1][0] + later[0][0]) * step
        for sooner, later in itertools.pairwise(epochs)
        if sooner and later
    ]
    return statistics.fmean(gaps) if gaps else None


def read_calls(calls: Sequence[Sequence[float]]) -> Block:
    """Returns the block of a contestant that reports only the length of two calls.

    Args:
        calls: two pairs of epochs and seconds.
    """
    (few, short), (many, long) = calls
    return Block(epoch=(long - short) / (many - few), call=long)


def slowest(blocks: Sequence[Block]) -> Block:
    """Returns the block of processes that run together: slowest times, mean processor time."""

    def of_all(name: str) -> float | None:
        values = [getattr(block, name) for block in blocks]
        if None in values:
            return None
        return statistics.fmean(values) if name == "processor" else max(values)

    return Block(**{field.name: of_all(field.name) for field in dataclasses.fields(Block)})
