"""Threads of a worker that report to the parent: `Heartbeat` progress, `StepWatch` a stuck step.

See `pool.silence` and `pool.stalls`, the parent's halves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

BEAT_SECONDS = 5.0  # between looks at the progress, at most
POLL_SECONDS = 1.0  # how often a `StepWatch` looks


def beat_seconds(stall_seconds: float) -> float:
    """Returns the seconds between a worker's reports of progress."""
    return min(BEAT_SECONDS, stall_seconds / 4)  # a late report is not yet a stall


class Heartbeat:
    """A worker's thread that reports progress.

    Args:
        seconds: the time between looks.
        progress: returns something that changes as the worker makes progress.
        tell: called when that value has changed.
    """

    def __init__(
        self, seconds: float, progress: Callable[[], Any], tell: Callable[[], None]
    ) -> None:
        self._seconds = seconds
        self._progress = progress
        self._tell = tell
        threading.Thread(target=self._run, name="nanotf-heartbeat", daemon=True).start()

    def _run(self) -> None:
        known = self._progress()
        while True:
            time.sleep(self._seconds)
            found = self._progress()
            if found != known:
                known = found
                self._tell()


class StepWatch:
    """A worker's thread that notices a step that does not end.

    Args:
        seconds: how long a step may last.
        step_since: returns the time (`timing.now`) at which the current step began;
            None between steps.
        tell: called with that time, at every look while a step lasts longer than `seconds`.
        look: called at every look.
    """

    def __init__(
        self,
        seconds: float,
        step_since: Callable[[], int | None],
        tell: Callable[[int], None],
        look: Callable[[], None],
    ) -> None:
        self._seconds = seconds
        self._step_since = step_since
        self._tell = tell
        self._look = look
        threading.Thread(target=self._run, name="nanotf-watch", daemon=True).start()

    def _run(self) -> None:
        # Counted in looks: the clock also runs while this process or the machine is suspended.
        known, lasted = None, 0.0
        while True:
            time.sleep(POLL_SECONDS)
            self._look()
            since = self._step_since()
            lasted = lasted + POLL_SECONDS if since == known else 0.0
            known = since
            if since is not None and lasted > self._seconds:
                self._tell(since)
