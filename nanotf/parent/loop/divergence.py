"""Detects ranks of a `@nano` function that diverged: which rank waits for which, and where.

Ranks that take different paths would wait for each other forever. With transport "shm" the
group's memory shows which rank waits in which collective. With "grpc" the ranks report how many
collectives they have begun, and which (`collectives.tally`).
"""

from __future__ import annotations

from typing import Any

from nanotf.errors import CollectiveError
from nanotf.wire import messages
from nanotf.wire.failures import Failure, FailureKind

OF_FUNCTIONS = (
    "All workers must take the same path through a @nano function, and run the same steps.",
    "Decide by values that are equal on all of them, like the loss that a step returns, not by the "
    "rank, the time or the order of a set.",
)
STUCK_LOOKS = 10  # looks without progress, a second or more apart, before ranks count as diverged


class DivergenceDetector:
    """Detector of diverged ranks in one call.

    Args:
        name: the user's code, for errors, such as the name of a function.
        size: number of workers.
        rule: what the error says first, and the remedy that it ends with.
    """

    def __init__(self, name: str, size: int, rule: tuple[str, str] = OF_FUNCTIONS) -> None:
        self._name = name
        self._rule, self._remedy = rule
        self._size = size
        self._stuck: tuple[list[Any], int] = ([], 0)  # the last waits, and looks at the same ones
        self._reached: dict[int, messages.Reached] = {}  # by rank, the latest

    def note(self, message: messages.Reached) -> None:
        """Records the report of a rank with transport "grpc"."""
        self._reached[message.rank] = message

    def poll(self, group: Any, ended: set[int]) -> None:
        """Checks the ranks; called when no worker has sent a message for a second.

        Args:
            group: `collectives.GroupOwner`, or None with transport "grpc".
            ended: the ranks that have returned from the function.

        Raises:
            CollectiveError: Ranks have diverged.
        """
        if group is None:
            self._look_at_counts(ended)
        else:
            self._look_at_waits(group.waits(), ended)

    def check(self) -> None:
        """Checks the ranks' reports after all have returned, or one has failed.

        With "grpc" diverged ranks may have met by accident, or TensorFlow's error names no reason.
        """
        self._look_at_counts(set())

    def explain(self, rank: int, failure: Failure) -> CollectiveError | None:
        """Returns the error for a collective that failed; None if the ranks have not diverged."""
        if failure.kind not in (FailureKind.DIFFERENT, FailureKind.EXPIRED):
            return None
        return self.error(f"in rank {rank} a collective failed: {failure.text}")

    def _look_at_waits(self, waits: list[Any], ended: set[int]) -> None:
        for wait in waits:
            # A rank that has returned never comes, so nothing need be waited for.
            gone = sorted(ended & set(wait.missing))
            if gone:
                raise self._left(gone[0], wait.rank, wait.what)
        # Diverged ranks all wait, and for the same at each look. While one still computes, it may
        # come, and the count begins anew.
        waiting = {wait.rank for wait in waits}
        before, looks = self._stuck
        looks = looks + 1 if waits == before and len(waiting) == self._size - len(ended) else 0
        self._stuck = (waits, looks)
        if looks >= STUCK_LOOKS and waits:
            places = [
                f"rank {w.rank} waits for {list(w.missing)} in a collective: {w.what}"
                for w in waits
            ]
            raise self.error("; ".join(places))

    def _look_at_counts(self, ended: set[int]) -> None:
        told = sorted(self._reached.values(), key=lambda reached: reached.rank)
        for gone in told:
            for other in told:
                if gone.rank in ended and other.count > gone.count:
                    raise self._left(gone.rank, other.rank, other.what)
        for one in told:
            for other in told:
                if one.count == other.count and one.fingerprint != other.fingerprint:
                    raise self.error(
                        f"the collectives that the ranks have begun differ: number {one.count} is "
                        f"{one.what} on rank {one.rank}, but {other.what} on rank {other.rank}"
                    )

    def _left(self, gone: int, waits: int, what: str) -> CollectiveError:
        return self.error(
            f"rank {gone} has finished, and rank {waits} waits for it in a collective: {what}"
        )

    def error(self, received: str) -> CollectiveError:
        """Returns the error, with its remedy.

        Args:
            received: what each rank does, as the end of a sentence.
        """
        text = f"{self._rule} Received: in {self._name}, {received}. {self._remedy}"
        return CollectiveError(text)
