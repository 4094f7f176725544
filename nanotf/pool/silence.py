"""Lets the parent tell a silent worker that makes progress from a stuck one.

    worker                                          parent
      counts steps and collectives as it proceeds
      watch.Heartbeat: has the count changed?  Progress ->  Silence: who made no progress for long?

A worker waits for another, or for the parent, only where somebody looks at the clock, see `stalls`.
What is left is a worker that is busy, or waits, by itself: in the user's code, in a compiler, in a
data set. Nobody can know whether that will end, and a single process would wait as well; so it is
no error. But it is said, with the Python stacks of all, and again after twice the time.

The worker reports progress, and not the lack of it: code that holds the GIL would
keep it from saying that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# After this much more than the time that ranks wait for each other: what they say then is an error,
# and names the one that is missing.
MARGIN_SECONDS = 5.0


class Silence:
    """The parent's side: the workers without progress for long.

    All times are in seconds, by any clock.

    Args:
        seconds: float, the time after which that is said; then after twice, four times ...
    """

    def __init__(self, seconds: float) -> None:
        self._first = seconds + MARGIN_SECONDS
        self._heard: dict[int, float] = {}  # by rank, when it last made progress
        self._after: dict[int, float] = {}  # by rank, after how long a silence it is said (again)

    def begin(self, ranks: Iterable[int], now: float) -> None:
        """A job begins."""
        for rank in ranks:
            self.heard(rank, now)

    def heard(self, rank: int, now: float) -> None:
        """Notes that a rank makes progress."""
        self._heard[rank], self._after[rank] = now, self._first

    def look(self, excused: Collection[int], now: float) -> tuple[list[int], float]:
        """Returns the ranks without progress, if it is time to report them.

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
