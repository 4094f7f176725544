"""Records the times of calls in a worker, while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.wire import timing


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
        # The thread of calls writes both; the threads of `worker.watch` read them.
        self.step_since: int | None = None  # when the running step began
        self._steps = 0  # begun and ended, in all calls
        self.begin()

    def begin(self) -> None:
        """Starts the times of a call that was received."""
        self._times = timing.WorkerTimes(rank=self._rank, began=timing.now())
        self._open: list[timing.Pass] = []
        self._begun: set[str] = set()  # the kinds that had their first execution
        self._before = self._counted()

    def ready(self) -> None:
        """Records that the model is rebuilt and has its values."""
        self._times.ready = timing.now()
        self._before = self._counted()  # collectives of the rebuilding do not count

    def finish(self) -> timing.WorkerTimes:
        """Ends the call and returns its times."""
        times, group = self._times, self._group
        times.ended = timing.now()
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
        """Kind of the current pass, one of `timing.KINDS`; "" outside any."""
        return self._open[-1].kind if self._open else ""

    def begin_pass(self, kind: str, index: int | None = None) -> None:
        """Begins a pass over data. A validation pass may begin inside a training pass."""
        self._open.append(timing.Pass(kind, index, timing.now()))
        self._times.passes.append(self._open[-1])

    def end_pass(self) -> None:
        """Ends the pass that began last."""
        self._open.pop().ended = timing.now()

    def callback(self, base: type) -> Any:
        """Returns a callback that records every pass over data. It has no batch hooks.

        Args:
            base: Keras's class of callbacks.
        """

        def begin_epoch(_: Any, epoch: int, logs: Any = None) -> None:
            self.begin_pass(timing.TRAIN, epoch)

        def begin_test(_: Any, logs: Any = None) -> None:
            self.begin_pass(timing.TEST)

        def begin_predict(_: Any, logs: Any = None) -> None:
            self.begin_pass(timing.PREDICT)

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
        if step is None or hasattr(step, "_nanotf_timed"):  # Keras keeps it for the next `fit`
            return step

        def timed_step(iterator: Any) -> Any:
            # Reads the step's start time before the start time of its input: the system may preempt
            # the thread between the two.
            with self.stepping() as began:
                before = self._counted(steps_begin=True)
                result = step(iterator)
            self._note(kind, answered(), began, timing.now(), before)
            return result

        # Copies the function's other attributes, see `keras_steps.keeping`.
        timed_step.__dict__.update(vars(step), _nanotf_timed=True)
        return timed_step

    @contextlib.contextmanager
    def stepping(self) -> Iterator[int]:
        """Runs a step in this context. Yields its start time."""
        outer, began = self.step_since, timing.now()
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
        began = timing.now()
        yield
        ended = timing.now()
        if not self._open:  # between epochs, it is part of their ends
            return
        self._open[-1].hooks += ended - began
        hooks = self._times.hooks
        if len(hooks) < timing.HOOKS_KEPT * timing.HOOK_COLUMNS:
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
        # A long call must not fill the memory.
        if len(steps) < timing.STEPS_KEPT * timing.STEP_COLUMNS:
            steps.extend(
                (timing.KINDS.index(kind), began, ended, waiting, in_calls, waited, answered)
            )
        if not self._open:  # `auto` also times steps outside passes
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
