"""Times of a call, recorded while it runs, in the workers and in the parent.

All times are nanoseconds of the system's monotonic clock, which the processes of one machine
share. Times of another machine are moved (`WorkerTimes.moved`). Recording costs about 5 us for
each execution of steps, 2 us for each step, and two reads of the clock for each collective.
`report` evaluates the times when the call has ended.
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


def parts_of(span: int, waiting: int, in_calls: int, waited: int) -> tuple[int, int, int]:
    """Limits the measured parts of a span of time, so that together they are no longer than it.

    As measured they can be longer: times of concurrent collectives add up, and one may run while
    the step waits for its next data.

    Args:
        span: the length of the span.
        waiting: for data.
        in_calls: in collectives.
        waited: the part of `in_calls` spent waiting for other ranks.

    Returns:
        The last three, limited.
    """
    waiting = min(waiting, span)
    in_calls = min(in_calls, span - waiting)
    return waiting, in_calls, min(waited, in_calls)


class Stopwatch:
    """A worker's stopwatch. The thread that runs calls uses it; any thread may call `progress`.

    Args:
        group: `collectives.Group`, or None if TensorFlow communicates by itself.
    """

    def __init__(self, rank: int, group: Any) -> None:
        self._rank = rank
        self._group = group
        self.step_since: int | None = None  # when the running step began
        self._steps = 0  # begun and ended, in all calls
        self.begin()

    def begin(self) -> None:
        """Starts the times of a call that was received."""
        self._times = WorkerTimes(rank=self._rank, began=now())
        self._open: list[Pass] = []
        self._begun: set[str] = set()  # the kinds that had their first execution
        self._before = self._counted()

    def ready(self) -> None:
        """Records that the model is rebuilt and has its values."""
        self._times.ready = now()
        self._before = self._counted()

    def finish(self) -> WorkerTimes:
        """Ends the call and returns its times."""
        times, group = self._times, self._group
        times.ended = now()
        times.ready = times.ready or times.began
        if group is not None:
            after = group.times()
            _, in_calls_before, waited_before, _ = self._before
            _, in_calls, waited, _ = after
            _, times.in_calls, times.waited = parts_of(
                times.ended - times.ready, 0, in_calls - in_calls_before, waited - waited_before
            )
            times.knows_calls, times.knows_input = True, group.stamps
        self.begin()
        return times

    @property
    def kind(self) -> str:
        """Kind of the current pass, one of `KINDS`; "" outside any."""
        return self._open[-1].kind if self._open else ""

    def begin_pass(self, kind: str, index: int | None = None) -> None:
        """Begins a pass over data. A validation pass may begin inside a training pass."""
        self._open.append(Pass(kind, index, now()))
        self._times.passes.append(self._open[-1])

    def end_pass(self) -> None:
        """Ends the pass that began last."""
        self._open.pop().ended = now()

    def callback(self, base: type) -> Any:
        """Returns a callback that records every pass over data. It has no batch hooks.

        Args:
            base: Keras's class of callbacks.
        """

        def begin_epoch(_: Any, epoch: int, logs: Any = None) -> None:
            self.begin_pass(TRAIN, epoch)

        def begin_test(_: Any, logs: Any = None) -> None:
            self.begin_pass(TEST)

        def begin_predict(_: Any, logs: Any = None) -> None:
            self.begin_pass(PREDICT)

        def end(*_: Any, **__: Any) -> None:
            self.end_pass()

        hooks = {
            "on_epoch_begin": begin_epoch,
            "on_test_begin": begin_test,
            "on_predict_begin": begin_predict,
            **dict.fromkeys(("on_epoch_end", "on_test_end", "on_predict_end"), end),
        }
        return type("TimesPasses", (base,), hooks)()

    def timed(self, kind: str, step: Any, answered: Callable[[], int] = lambda: 1) -> Any:
        """Returns a Keras step function that records its executions; None stays None.

        Args:
            kind: "train", "test" or "predict".
            step: a function of an iterator, or None.
            answered: returns how many of Keras's calls the finished execution answered.
        """
        if step is None or hasattr(step, "_nanotf_timed"):
            return step

        def timed_step(iterator: Any) -> Any:
            # Reads the step's start time before the start time of its input: the system may preempt
            # the thread between the two.
            with self.stepping() as began:
                before = self._counted(steps_begin=True)
                result = step(iterator)
            self._note(kind, answered(), began, now(), before)
            return result

        # Copies the function's other attributes, see `keras_steps.keeping`.
        timed_step.__dict__.update(vars(step), _nanotf_timed=True)
        return timed_step

    @contextlib.contextmanager
    def stepping(self) -> Iterator[int]:
        """Runs a step in this context. Yields its start time."""
        outer, began = self.step_since, now()
        self.step_since = began
        self._steps += 1
        try:
            yield began
        finally:
            self._steps += 1
            self.step_since = outer

    def progress(self) -> tuple[int, int]:
        """Returns the steps and collectives so far: numbers that change with progress."""
        return self._steps, 0 if self._group is None else self._group.calls()

    @contextlib.contextmanager
    def hook(self) -> Iterator[None]:
        """Waits for the parent's answer in this context. Counts the time if a pass is open."""
        began = now()
        yield
        ended = now()
        if not self._open:
            return
        self._open[-1].hooks += ended - began
        hooks = self._times.hooks
        if len(hooks) < HOOKS_KEPT * HOOK_COLUMNS:
            hooks.extend((began, ended))

    def _counted(self, steps_begin: bool = False) -> Any:
        return None if self._group is None else self._group.times(steps_begin)

    def _note(self, kind: str, answered: int, began: int, ended: int, before: Any) -> None:
        after = self._counted()
        waiting = in_calls = waited = 0
        if after is not None:
            _, in_calls_before, waited_before, input_before = before
            _, in_calls, waited, waiting = after
            waiting, in_calls, waited = parts_of(
                ended - began,
                waiting - input_before,
                in_calls - in_calls_before,
                waited - waited_before,
            )
        steps = self._times.steps
        if len(steps) < STEPS_KEPT * STEP_COLUMNS:  # a long call must not fill the memory
            steps.extend((KINDS.index(kind), began, ended, waiting, in_calls, waited, answered))
        if not self._open:
            return
        current = self._open[-1]
        current.executions += answered
        if kind not in self._begun:
            self._begun.add(kind)
            current.first += ended - began
            return
        current.inside += ended - began
        current.input += waiting
        current.in_calls += in_calls
        current.waited += waited

    def stamp(self, tensor: Any) -> Any:
        """Records, in a step, that its data have arrived.

        Args:
            tensor: one of the step's data.

        Returns:
            The operation that the rest of the step must follow; None if nothing records.
        """
        if self._group is None or not self._group.stamps:
            return None
        return self._group.stamp(tensor)


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
