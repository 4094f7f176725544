"""Lets the parent tell a silent worker that makes progress from a stuck one.

    worker                                          parent
      counts steps and collectives as it proceeds
      watch.Heartbeat: has the count changed?  Progress ->  Silence: who made no progress for long?

Every wait of a worker for another, or for the parent, has a timeout, see `stalls`. The remaining
workers are busy or wait by themselves: in the user's code, in a compiler, in a dataset. nanotf
cannot tell if that will end, and a single process would wait as well. So it is not an
error: nanotf logs a warning with all Python stacks, and again after twice the time.

Workers report progress, not the lack of it: code that holds the GIL would keep them from
reporting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# Added to the timeout of waits between ranks: the error of an expired wait comes first, and names
# the missing rank.
MARGIN_SECONDS = 5.0


class Silence:
    """The parent's record of workers that have made no progress for long.

    All times are in seconds, by any clock.

    Args:
        seconds: the silence after which to report; reports repeat after twice the time,
            four times the time, and so on.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._first = seconds, seconds + MARGIN_SECONDS
        self._heard: dict[int, float] = {}  # by rank, the time of its last progress
        self._after: dict[int, float] = {}  # by rank, the silence after which to report (again)

    def begin(self, ranks: Iterable[int], now: float) -> None:
        """Starts the clocks of all ranks at the beginning of a call."""
        for rank in ranks:
            self.heard(rank, now)

    def heard(self, rank: int, now: float) -> None:
        """Records that a rank has made progress."""
        self._heard[rank], self._after[rank] = now, self._first

    def check(self, excused: Collection[int], now: float) -> tuple[list[int], float]:
        """Returns the ranks without progress, if it is time to report them.

        Args:
            excused: ranks that wait for the parent, or have ended the call.

        Returns:
            The ranks, maybe none, and the seconds since the last progress of the one that has been
            silent longest.
        """
        for rank in excused:
            self.heard(rank, now)
        silent = {rank: now - heard for rank, heard in self._heard.items()}
        if all(seconds <= self._after[rank] for rank, seconds in silent.items()):
            return [], 0.0
        # All that are over the limit, not only those that are over the margin as well: ranks that
        # stop together are heard of at different moments, and one report names all.
        late = [rank for rank, seconds in silent.items() if seconds > self._seconds]
        for rank in late:
            self._after[rank] = 2 * silent[rank]
        return late, max(silent.values())
