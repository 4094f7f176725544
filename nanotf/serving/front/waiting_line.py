"""The requests that wait for a worker, by the model that they ask for."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator

from nanotf.console import logger
from nanotf.serving.front.costs import Costs
from nanotf.serving.front.incoming import Incoming
from nanotf.serving.interface import Interface, Refusal, Request, Response

Key = tuple[str, int | None]  # a model, and its version; None for a worker's latest


@dataclasses.dataclass
class Pending:
    """A request on its way to a worker."""

    incoming: Incoming
    interface: Interface
    request: Request
    key: Key
    deadline: float  # the loop's time
    answer: Callable[[Pending, Response], None]  # called once, unless the client leaves before
    # Whether a worker has died with it. It then runs alone, so that it takes no other with it.
    was_lost: bool = False
    rows: float = 1.0  # estimated
    is_answered: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of its body."""
        return len(self.request.body)

    def refuse(self, refusal: Refusal) -> None:
        """Answers that it cannot be answered."""
        self.finish(self.interface.refuse(refusal))

    def finish(self, answer: Response) -> None:
        """Answers it, unless that was done. No failure of one answer reaches others."""
        if self.is_answered:
            return
        self.is_answered = True
        try:
            self.answer(self, answer)
        except Exception:
            logger.exception("An answer could not be sent.")


class WaitingLine:
    """Requests that wait. The oldest is first, but for those that a worker has lost.

    Attributes:
        count, nbytes: int, the requests that wait, and the bytes of their bodies.
        costs: dict of a model's name to its `Costs`.
    """

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.costs: collections.defaultdict[str, Costs] = collections.defaultdict(Costs)
        self._lines: dict[Key, collections.deque[Pending]] = {}
        self._rows: collections.defaultdict[str, float] = collections.defaultdict(
            float
        )  # that wait, by model

    def add(self, pending: Pending) -> None:
        """Adds a request at the end, or at the front if it was lost."""
        model = pending.key[0]
        # Kept: the estimate may be another when `_drop` subtracts it.
        pending.rows = self.costs[model].rows_of(pending.nbytes)
        self._rows[model] += pending.rows
        line = self._lines.setdefault(pending.key, collections.deque())
        (line.appendleft if pending.was_lost else line.append)(pending)
        self.count += 1
        self.nbytes += pending.nbytes

    def by_age(self) -> list[Key]:
        """Returns what is asked for, the one that waits longest first."""
        return sorted(self._lines, key=lambda key: self._lines[key][0].incoming.began)

    def take(self, key: Key, most_rows: float, most: int) -> list[Pending]:
        """Takes what one worker is to compute next.

        Args:
            most_rows: of all, as far as their sizes tell. The first may have more.
            most: the number of requests.
        """
        line, rows = self._lines[key], 0.0
        taken: list[Pending] = []
        while line and len(taken) < most:
            if line[0].incoming.has_left:
                self._drop(line.popleft())
                continue
            first = line[0]
            rows += first.rows
            if taken and (rows > most_rows or first.was_lost):
                break
            self._drop(line.popleft())
            taken.append(first)
            if first.was_lost:
                break
        if not line:
            del self._lines[key]
        return taken

    def _drop(self, pending: Pending) -> None:
        self.count -= 1
        self.nbytes -= pending.nbytes
        self._rows[pending.key[0]] -= pending.rows

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def remove(self, is_unwanted: Callable[[Pending], bool]) -> list[Pending]:
        """Removes requests, and returns them."""
        found = [each for each in self if is_unwanted(each)]
        gone = set(map(id, found))
        for key in {each.key for each in found}:
            line = collections.deque(p for p in self._lines[key] if id(p) not in gone)
            if line:
                self._lines[key] = line
            else:
                del self._lines[key]
        for each in found:
            self._drop(each)
        return found

    def __iter__(self) -> Iterator[Pending]:
        for line in list(self._lines.values()):
            yield from line

    def seconds(self, most_rows: float) -> float:
        """Estimates how long one worker would need for all that waits."""
        # Rounding may leave a sum slightly below zero.
        return sum(self.costs[m].seconds(max(0.0, n), most_rows) for m, n in self._rows.items())
