"""The rows of what takes time: a status, and the items of a call."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from nanotf.console.screen import TICK_SECONDS, screen

DRAW_SECONDS = 0.1  # between two drawings of a bar that has gone meanwhile

_Outcome = TypeVar("_Outcome")
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
    """Shows a status while this context runs. A log gets one line.

    Args:
        text: without nanotf's prefix.
    """
    if _silent.get():
        yield
        return
    with screen.showing(_Status(text)):
        yield


class _Status:
    label = ""

    def __init__(self, words: str) -> None:
        self._words, self._began = words, time.monotonic()
        self.logged: float | None = None

    def fraction(self) -> float | None:
        return None

    def text(self) -> str:
        seconds = time.monotonic() - self._began
        return self._words if seconds < 1 else f"{self._words} ({seconds:.0f} s)"


class ItemBar:
    """Shows the items of a call: how many have ended and how many run, and the time left.

    The thread that runs the items says what becomes of them; the one that waits for them draws.

    Args:
        label: a word for the call.
        verbose: 0 shows nothing, 1 and "auto" a bar, 2 a line for each item that has ended.
        note: returns what else to say, such as the best value so far.
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
        self.logged: float | None = None
        self._make_note, self._note = note, ""
        self._noted = before  # the items that had ended when the note was made
        self._is_bar, self._has_lines = verbose in (1, "auto"), verbose == 2
        self._clock = clock
        self._before = self._ended = before
        self._total = before + after
        self._failed = 0
        self._began = 0.0
        self._has_ended = False
        self._drawn = -DRAW_SECONDS  # when
        self._running: dict[int, float] = {}  # by item, when it began
        self._spent = 0.0  # seconds of all items that have ended

    def begin(self, total: int) -> None:
        """Starts the bar, at 0 of `total` items of this call."""
        self._total += total
        self._began = self._clock()

    def item_begins(self, item: int) -> None:
        """Notes that an item runs, for the first time or again."""
        if item not in self._running:
            self._running[item] = self._clock()

    def item_is_lost(self, item: int) -> None:
        """Notes that an item does not run any more, and has not ended."""
        self._running.pop(item, None)

    def item_ends(self, item: int, seconds: float, failed: bool = False) -> None:
        """Notes that an item has ended, and how long it took; one that never ran can only fail."""
        self._running.pop(item, None)
        self._spent += seconds
        self._ended += 1
        self._failed += failed
        if self._has_lines:
            how = "failed after" if failed else "took"
            text = f"{self._count()}: item {item} {how} {duration(seconds)}"
            screen.print_above(f"{self.label} {text}")

    def wait_for(self, outcomes: queue.SimpleQueue[_Outcome]) -> _Outcome:
        """Returns the next outcome of the items; shows the bar until it is there."""
        # Nobody sees a bar that is gone at once, and drawing takes longer than a short item.
        first = max(0.0, self._drawn + DRAW_SECONDS - time.monotonic())
        with contextlib.suppress(queue.Empty):
            return outcomes.get(timeout=first)
        with self.shown():
            while True:
                self._drawn = time.monotonic()
                with contextlib.suppress(queue.Empty):
                    return outcomes.get(timeout=TICK_SECONDS)
                screen.tick()

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the bar is shown, and does not go between two items."""
        return screen.showing(self) if self._is_bar else contextlib.nullcontext()

    def end(self) -> None:
        """Ends the call, and leaves a line. A second time does nothing."""
        if self._is_bar and not self._has_ended:
            self._has_ended = True
            screen.print_last(self, self.last_text())

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
        """Returns what stays."""
        seconds = duration(self._clock() - self._began)
        whole = f"{self._count()} in" if self._ended == self._total else f"{self._count()} after"
        return ", ".join([f"{whole} {seconds}", *self._notes()])

    def seconds_left(self) -> float | None:
        """Returns about how long the call will take from now; None before an item has ended.

        Each item counts as long as those that have ended, and the workers that now have an item
        share them. The last items need their own time, however many workers are idle.
        """
        ended, running = self._ended - self._before, list(self._running.values())
        if not ended or not running:
            return None
        mean, now = self._spent / ended, self._clock()
        left = [max(0.0, mean - (now - began)) for began in running]
        waiting = self._total - self._ended - len(left)
        return max((sum(left) + waiting * mean) / len(left), *left)

    def _count(self) -> str:
        return f"{self._ended}/{self._total}"

    def _notes(self) -> list[str]:
        if self._noted != self._ended:
            self._noted = self._ended
            # A database that cannot be read now ends no call: the note is for people.
            with contextlib.suppress(Exception):
                self._note = self._make_note()
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
