"""The rows of what takes time: a status, and the items of a call."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.console.lines import say
from nanotf.console.screen import screen

_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("silent", default=False)


@contextlib.contextmanager
def silent(is_silent: bool) -> Iterator[None]:
    """Shows no status in this context, nor in one inside it.

    A thread that works for the user's call needs a copy of the call's context.

    Args:
        is_silent: False changes nothing.
    """
    token = _silent.set(is_silent or _silent.get())
    try:
        yield
    finally:
        _silent.reset(token)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Shows in this context what takes time; in a log, a line at its beginning.

    Args:
        text: without nanotf's prefix.
    """
    if _silent.get():
        yield
        return
    row = _Status(text)
    screen.add(row)
    try:
        yield
    finally:
        screen.remove(row)


class _Status:
    label = ""

    def __init__(self, words: str) -> None:
        self._words, self._began = words, time.monotonic()

    def fraction(self) -> float | None:
        return None

    def text(self) -> str:
        seconds = time.monotonic() - self._began
        return self._words if seconds < 1 else f"{self._words} ({seconds:.0f} s)"

    def last_text(self) -> str:
        return ""


class ItemBar:
    """Shows the items of a call: how many have ended and how many run, and the time left.

    Any thread may call its methods.

    Args:
        label: a word for the call.
        verbose: 0 shows nothing, 1 and "auto" a bar, 2 a line for each item that has ended.
        note: returns what else to say, such as the best value so far; called after each item.
        clock: returns seconds.
        before, after: how many items of the whole have ended before, and how many come after.
    """

    def __init__(
        self,
        label: str,
        verbose: Any,
        note: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
        before: int = 0,
        after: int = 0,
    ) -> None:
        self.label = label
        self._make_note, self._note = note, ""
        self._is_bar, self._has_lines = verbose in (1, "auto"), verbose == 2
        self._clock = clock
        self._before = self._ended = before
        self._total = before + after
        self._failed = 0
        self._began = self._ended_at = 0.0
        self._running: dict[int, float] = {}  # by item, when it began
        self._spent = 0.0  # seconds of all items that have ended

    def begin(self, total: int) -> None:
        """Begins with no item of a number of items."""
        self._total += total
        self._began = self._clock()
        if self._is_bar:
            screen.add(self)

    def item_begins(self, item: int) -> None:
        """Notes that an item runs, for the first time or again."""
        self._running[item] = self._clock()
        self._change()

    def item_is_lost(self, item: int) -> None:
        """Notes that an item does not run any more, and has not ended."""
        self._running.pop(item, None)
        self._change()

    def item_ends(self, item: int, failed: bool = False) -> None:
        """Notes that an item has ended; one that has never run can only fail."""
        began = self._running.pop(item, None)
        seconds = 0.0 if began is None else self._clock() - began
        self._spent += seconds
        self._ended += 1
        self._failed += failed
        if self._is_bar:
            self._note = self._make_note()
        self._change()
        if self._has_lines:
            how = "failed after" if failed else "took"
            self._say(f"{self._count()}: item {item} {how} {duration(seconds)}")

    def end(self) -> None:
        """Ends the call. A second time does nothing."""
        self._ended_at = self._ended_at or self._clock()
        if self._is_bar:
            screen.remove(self)

    def _change(self) -> None:
        if self._is_bar:
            screen.change(self)

    def _say(self, text: str) -> None:
        if sys.stderr is not None:
            say(f"{self.label} {text}", sys.stderr)

    # ------------------------------------------------------------------------------ as a row
    def fraction(self) -> float:
        return self._ended / self._total

    def text(self) -> str:
        parts = [self._count()]
        if running := len(self._running):
            parts.append(f"{running} running")
        parts.append(duration(self._clock() - self._began))
        if left := self.seconds_left():  # an item that takes longer than others leaves no time
            parts.append(f"about {duration(left)} left")
        return ", ".join([*parts, *self._notes()])

    def last_text(self) -> str:
        seconds = duration(self._ended_at - self._began)
        whole = f"{self._count()} in" if self._ended == self._total else f"{self._count()} after"
        return ", ".join([f"{whole} {seconds}", *self._notes()])

    def seconds_left(self) -> float | None:
        """Returns about how long the call will take from now; None before an item has ended.

        Each item counts as long as those that have ended, and the workers that now have an item
        share them. The last items need their own time, however many workers are idle.
        """
        ended = self._ended - self._before
        if not ended or not self._running:
            return None
        mean, now = self._spent / ended, self._clock()
        left = [max(0.0, mean - (now - began)) for began in list(self._running.values())]
        waiting = self._total - self._ended - len(left)
        return max((sum(left) + waiting * mean) / len(left), *left)

    def _count(self) -> str:
        return f"{self._ended}/{self._total}"

    def _notes(self) -> list[str]:
        failed = [f"{self._failed} failed"] if self._failed else []
        return [*failed, *([self._note] if self._note else [])]


def duration(seconds: float) -> str:
    """Returns a time for people: "0.8 s", "12 s", "3:05 min", "1:02:03 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"
