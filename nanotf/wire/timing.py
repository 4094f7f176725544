"""Times of a call, recorded while it runs, in the workers and in the parent.

All times are nanoseconds of the system's monotonic clock, which the processes of one machine
share. Times of another machine are moved (`WorkerTimes.moved`). Recording costs about 5 us for
each execution of steps, 2 us for each step, and two reads of the clock for each collective.
`report.stopwatch` records those of a worker; `report` evaluates them when the call has ended.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

STEPS_KEPT = 2000  # executions that a worker records one by one, 56 bytes each; sums have all
HOOKS_KEPT = 2000  # the same for hooks, 16 bytes each

TRAIN, TEST, PREDICT = "train", "test", "predict"
KINDS = (TRAIN, TEST, PREDICT)
STEP_COLUMNS = 7  # in `WorkerTimes.steps`: kind, begin, end, input, in calls, waited, calls
HOOK_COLUMNS = 2  # in `WorkerTimes.hooks`: begin, end

now: Callable[[], int] = time.monotonic_ns


@dataclasses.dataclass
class Pass:
    """One pass over data in a worker: an epoch of training, an evaluation, a prediction.

    Sums are over the executions of its own kind, without the call's first of that kind.
    """

    kind: str  # one of `KINDS`
    index: int | None  # the epoch; None for a pass of another kind
    began: int
    ended: int = 0
    # The number that Keras has requested; each is one step, or `steps_per_execution`. The first
    # counts, too.
    executions: int = 0
    inside: int = 0  # time in executions
    input: int = 0  # the part of `inside` spent waiting for data
    in_calls: int = 0  # the part of `inside` spent in collectives
    waited: int = 0  # the part of `in_calls` spent waiting for other ranks
    first: int = 0  # time in the call's first execution of the kind, which includes tracing
    hooks: int = 0  # time between executions at hooks that the parent must answer


@dataclasses.dataclass
class WorkerTimes:
    """The times that a worker recorded for one call."""

    rank: int
    began: int  # when it had received the call
    ready: int = 0  # when its model was rebuilt and had its values; `began` if there is no model
    ended: int = 0
    in_calls: int = 0  # time in collectives since `ready`
    waited: int = 0  # the part of it spent waiting for other ranks
    knows_calls: bool = False  # whether time in collectives was measured
    knows_input: bool = False  # whether waiting for data was measured
    passes: list[Pass] = dataclasses.field(default_factory=list)
    # `STEP_COLUMNS` for each of the first executions: the index in `KINDS`, begin, end, the times
    # of a `Pass`, and the number of Keras's calls.
    steps: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    # `HOOK_COLUMNS` for each of the first hooks in passes.
    hooks: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))

    def moved(self, by: int) -> WorkerTimes:
        """Converts the times to another machine's clock, which is `by` ahead."""
        steps = array.array("q", self.steps)
        for column in (1, 2):  # begin and end
            for place in range(column, len(steps), STEP_COLUMNS):
                steps[place] += by
        passes = [
            dataclasses.replace(p, began=p.began + by, ended=p.ended + by) for p in self.passes
        ]
        return dataclasses.replace(
            self,
            began=self.began + by,
            ready=self.ready + by,
            ended=self.ended + by,
            passes=passes,
            steps=steps,
            hooks=array.array("q", [at + by for at in self.hooks]),
        )


@dataclasses.dataclass
class Reading:
    """The parent's time for reading data for the workers, in parallel with everything else."""

    reading: int = 0  # in the user's dataset or generator
    copying: int = 0  # writing batches into shared memory
    batches: int = 0

    def over(self, data: Iterator[Any]) -> Iterator[Any]:
        """Yields an iterator's items, and counts the time in it."""
        while True:
            began = now()
            try:
                item = next(data)
            except StopIteration:
                return
            finally:
                self.reading += now() - began
            yield item


@dataclasses.dataclass
class CallTimes:
    """The times that the parent records for one call, in the order in which they occur."""

    # When its arguments were valid. A lambda, since tests replace `now`.
    began: int = dataclasses.field(default_factory=lambda: now())
    prepared: int = 0  # model and data were checked and described
    lent: int = 0  # a pool was available
    written: int = 0  # the call's blocks were filled; `on_train_begin` was called
    sent: int = 0  # the workers had the call
    done: int = 0  # all workers had ended it
    ended: int = 0  # their results were copied to the parent's model
    shipped: int = 0  # bytes in shared memory
    in_hooks: int = 0  # time in hooks while workers waited: copying weights back, and callbacks
    # Name, begin and end of each, of the first `HOOKS_KEPT`.
    hooks: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    readings: list[Reading] = dataclasses.field(default_factory=list)  # by stream number

    @contextlib.contextmanager
    def hook(self, name: str) -> Iterator[None]:
        """Counts the time in a hook for which the workers wait."""
        began = now()
        yield
        ended = now()
        self.in_hooks += ended - began
        if len(self.hooks) < HOOKS_KEPT:
            self.hooks.append((name, began, ended))
