"""How the parent knows that workers go on which have nothing to say.

    worker                                          parent
      counts steps and collectives as it goes on
      Heartbeat: has the count changed?  Progress ->  Silence: who has not gone on for long?

A worker waits for another, or for the parent, only where somebody looks at the clock, see `stalls`.
What is left is a worker that is busy, or waits, by itself: in the user's code, in a compiler, in a
data set. Nobody can know whether that will end, and a single process would go on as well; so it is
no error. But it is said, with the Python stacks of all, and again after twice the time.

The worker says that it goes on, and not that it does not: code that holds Python's lock would
keep it from saying that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

BEAT_SECONDS = 5.0
# After this much more than the time that ranks wait for each other: what they say then is an error,
# and names the one that is missing.
MARGIN_SECONDS = 5.0


def beat_seconds(stall_seconds: float) -> float:
    """How often a worker says that it goes on."""
    return min(BEAT_SECONDS, stall_seconds / 4)


class Heartbeat:
    """A worker's thread.

    Args:
        seconds: float, how often it looks.
        progress: callable, something that changes as the worker goes on.
        tell: callable, called when it has.
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


class Silence:
    """The parent's side: who has not gone on for long.

    All times are in seconds, by any clock.

    Args:
        seconds: float, the time after which that is said; then after twice, four times ...
    """

    def __init__(self, seconds: float) -> None:
        self._first = seconds + MARGIN_SECONDS
        self._heard: dict[int, float] = {}  # by rank, when it has gone on
        self._after: dict[int, float] = {}  # by rank, after how long a silence it is said (again)

    def begin(self, ranks: Iterable[int], now: float) -> None:
        """A job begins."""
        for rank in ranks:
            self.heard(rank, now)

    def heard(self, rank: int, now: float) -> None:
        """A rank goes on."""
        self._heard[rank], self._after[rank] = now, self._first

    def look(self, excused: Collection[int], now: float) -> tuple[list[int], float]:
        """Says who has not gone on, if it is time to say so.

        Args:
            excused: ranks that wait for the parent, or have ended the job.
            now: float.

        Returns:
            A tuple of the ranks, maybe none, and for how long one of them has not.
        """
        for rank in excused:
            self.heard(rank, now)
        silent = {rank: now - heard for rank, heard in self._heard.items()}
        if all(seconds <= self._after[rank] for rank, seconds in silent.items()):
            return [], 0.0
        late = [rank for rank, seconds in silent.items() if seconds > self._first]
        for rank in late:
            self._after[rank] = 2 * silent[rank]
        return late, max(silent.values())
