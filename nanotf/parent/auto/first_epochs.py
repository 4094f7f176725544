"""The first epochs of `num_processes="auto"`: trained in this process, and timed meanwhile.

    StepClock           times the steps of Keras's loop, all but the first, which is traced
    Watch               between two epochs: asks once what trains the rest, if others can
    Watch.watched       the class of a callback list that drives both
    HandedOver          leaves Keras's loop before the next epoch begins

The rest is another `fit`, from that epoch on, with the same callback list. It does not call
`on_train_begin` again, so that callbacks and the `History` see one training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MEASURED_SECONDS = 1.0  # of steps suffice to know how long one takes
MEASURED_STEPS = 50  # or so many


class HandedOver(BaseException):
    """Training continues elsewhere, with `epoch`. Code that catches `Exception` does not see it."""

    def __init__(self, epoch: int, choice: Any) -> None:
        super().__init__(epoch)
        self.epoch, self.choice = epoch, choice


class StepClock:
    """Times steps from the hooks around them."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.first: float | None = None  # seconds of the first execution, with its trace
        self._seconds, self._steps = 0.0, 0
        self._began: float | None = None  # of the time of this epoch that counts
        self._index = self._last = -1  # of steps in this epoch: before that time, and the last
        self._ended = 0.0  # when the last step did

    def begin_epoch(self) -> None:
        """Adds up the epoch before; the time between epochs does not count."""
        self._seconds, self._steps = self._sums()
        self._began, self._index, self._last = None, -1, -1

    def begin_step(self) -> None:
        """Starts the time with the epoch's first step."""
        if self._began is None:
            self._began = self._now()

    def end_step(self, index: int) -> None:
        """Ends a step, or the last of several that are one execution.

        Args:
            index: of the step in its epoch.
        """
        now = self._now()
        if self.first is None and self._began is not None:
            self.first = now - self._began
            self._began, self._index = now, index  # the step that was traced does not count
        self._last, self._ended = index, now

    def _sums(self) -> tuple[float, int]:
        steps = self._last - self._index
        if self._began is None or steps <= 0:
            return self._seconds, self._steps
        return self._seconds + self._ended - self._began, self._steps + steps

    @property
    def step(self) -> float | None:
        """Seconds of a step so far, without the first; None if there was no other."""
        seconds, steps = self._sums()
        return seconds / steps if steps else None

    @property
    def is_sure(self) -> bool:
        """True if enough steps were timed."""
        seconds, steps = self._sums()
        return steps > 0 and (seconds >= MEASURED_SECONDS or steps >= MEASURED_STEPS)


class Watch:
    """Watches a training in this process.

    Args:
        can_leave: called between two epochs once enough steps were timed: with the next epoch,
            whether another call can train from there on.
        choose: then called once: with the next epoch, what trains the rest, or None for this
            process.
    """

    def __init__(self, can_leave: Callable[[int], bool], choose: Callable[[int], Any]) -> None:
        self._can_leave, self._choose = can_leave, choose
        self.clock = StepClock()
        self.is_open = True  # until the choice was made
        self.epoch: int | None = None  # the present one
        self.steps = 0  # of the last epoch that has ended

    def begin_epoch(self, epoch: int) -> None:
        """Chooses, if it is time.

        Raises:
            HandedOver: Others train the rest.
        """
        before, self.epoch = self.epoch, epoch
        is_time = before is not None and self.is_open and self.clock.is_sure
        if is_time and self._can_leave(epoch):
            self.is_open = False
            choice = self._choose(epoch)
            if choice is not None:
                raise HandedOver(epoch, choice)
        self.clock.begin_epoch()

    def end_step(self, index: int) -> None:
        """Notes a step that has ended."""
        self.steps = index + 1
        self.clock.end_step(index)

    def watched(self, base: Any) -> Any:
        """Returns a class of callback lists that calls this object.

        Args:
            base: Keras's class, or one made from it.
        """
        watch = self

        class WatchedCallbackList(base):  # type: ignore[misc]
            _nanotf_began = False

            def on_train_begin(self, logs: Any = None) -> None:
                if not self._nanotf_began:  # else the rest of the same training begins
                    self._nanotf_began = True
                    super().on_train_begin(logs)

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if watch.is_open:
                    watch.begin_epoch(epoch)
                super().on_epoch_begin(epoch, logs)

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if watch.is_open:
                    watch.clock.begin_step()
                super().on_train_batch_begin(batch, logs)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                super().on_train_batch_end(batch, logs)
                if watch.is_open:
                    watch.end_step(batch)

        return WatchedCallbackList
