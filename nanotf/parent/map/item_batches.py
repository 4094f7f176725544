"""The items that a worker has, and how many it should have.

Many short items travel in one message, and their results come together. A worker has at most
`AHEAD_SECONDS` of items, by the time that the last ones took: a long item travels alone. That is a
forecast. If it was wrong, and short items wait behind a long one, the parent takes them back for a
worker that has none.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

from nanotf.wire import item_pipes
from nanotf.wire.item_pipes import ItemPipes

AHEAD_SECONDS = 0.05  # of items for one worker; their results come so late at most
MOST_BYTES = 1 << 20  # of the pickles and arrays of an order's items


@dataclasses.dataclass(slots=True)  # a frozen one takes three times as long to make
class EndOfItem:
    """The end of an item, as a worker has recorded it."""

    index: int
    seconds: float
    result: bytes


class Pace:
    """The number of items that a worker should have at a time, by those that have ended."""

    def __init__(self) -> None:
        self._seconds: float | None = None  # of an item

    def note(self, seconds: Sequence[float]) -> None:
        """Takes the times of items that have ended: the estimate grows at once, falls by halves."""
        if seconds:
            mean = sum(seconds) / len(seconds)
            self._seconds = mean if self._seconds is None else max(mean, self._seconds / 2)

    def most(self) -> int:
        """Returns the number of items for a worker."""
        if self._seconds is None:
            return 1
        return max(1, min(int(AHEAD_SECONDS / max(self._seconds, 1e-9)), item_pipes.MOST))


class GivenItems:
    """The items that one worker process has, in the order in which it runs them.

    Attributes:
        count: int, how many it has had.
        ended: int, how many of those have ended.
    """

    def __init__(self) -> None:
        self.pipes = ItemPipes()
        self.count = self.ended = 0
        self._since = time.monotonic()  # when the item that runs can have begun, at the earliest
        self._items: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def running(self) -> int | None:
        """Returns the first that has not ended; None if there is none."""
        return next(iter(self._items), None)

    def seconds(self) -> float:
        """Returns for how long the worker has told of no end."""
        return time.monotonic() - self._since

    def is_late(self) -> bool:
        """Returns True if an item seems to take longer than all that the worker should have."""
        return bool(self._items) and self.seconds() > AHEAD_SECONDS

    def give(self, order: int, items: Sequence[int]) -> int:
        """Offers items to the worker; returns how many, see `ItemPipes.offer`."""
        if not self._items:
            self._since = time.monotonic()
        given = self.pipes.offer(order, items)
        self._items.update(dict.fromkeys(items[:given]))
        self.count += given
        return given

    def end(self, index: int) -> bool:
        """Notes the end of an item; returns False if that was known."""
        if index not in self._items:
            return False
        del self._items[index]
        self.ended += 1
        self._since = time.monotonic()
        return True

    def take_back(self) -> list[int]:
        """Returns the items that the worker has not begun, which are no longer its own."""
        found = self.pipes.withdraw()
        for index in found:
            del self._items[index]
        self.count -= len(found)
        return found

    def new_ends(self) -> Iterator[EndOfItem]:
        """Yields what the worker has recorded since."""
        for index, seconds, result in self.pipes.ended():
            if self.end(index):
                yield EndOfItem(index, seconds, result)
