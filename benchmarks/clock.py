"""The clock that every contestant trains with. Runs in the contestants' processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Any


class Processor:
    """Processor time of steps, per process that computes them.

    See `clock_getcpuclockid(3)`.

    Args:
        pids: sequence of int, all processes whose time counts.
        size: int, how many of them compute. The other processes' time is divided among these.
    """

    def __init__(self, pids: Any, size: int = 1) -> None:
        self._size = size
        library = ctypes.CDLL(None)
        self._clocks: dict = {}  # type: ignore[type-arg]
        for pid in pids if hasattr(library, "clock_getcpuclockid") else ():
            found = ctypes.c_int()
            if library.clock_getcpuclockid(pid, ctypes.byref(found)) == 0:
                self._clocks[found.value] = 0.0

    def seconds(self) -> Any:
        """Returns seconds per computing process, since its start; None if they cannot be read."""
        if not self._clocks:
            return None
        for clock in self._clocks:
            # A process that has ended, such as a worker of an earlier number of workers, keeps its
            # last time.
            with contextlib.suppress(OSError):
                self._clocks[clock] = time.clock_gettime(clock)
        return sum(self._clocks.values()) / self._size


def own_processor() -> Processor:
    """Returns the processor time of this process."""
    return Processor([os.getpid()])


def make_clock(keras: Any, processor: Any) -> Any:
    """Returns a Keras callback that notes when epochs and steps end.

    It declares to nanotf that workers need not wait for it; see the package's docstring.

    Args:
        keras: the module.
        processor: `Processor`.

    Attributes of the callback:
        ends: list of float, `time.monotonic()` at the end of each epoch.
        steps: list of `[epoch, step, time, processor time]`, for each step whose end was
            reported; times in seconds.
    """

    class Clock(keras.callbacks.History):  # type: ignore[misc]
        nanotf_needs = "progress"

        def __init__(self) -> None:
            super().__init__()
            self.ends: list = []  # type: ignore[type-arg]
            self.steps: list = []  # type: ignore[type-arg]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.monotonic()
            self.steps.append([len(self.ends), batch, now, processor.seconds()])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            self.ends.append(time.monotonic())

    return Clock()
