"""Shows rows that change: at the bottom of a terminal, or as lines of a log.

    with screen.showing(row)   a row, while somebody waits for what it shows
    screen.tick()              draws all rows again; called by the thread that waits
    with screen.above()        takes the rows away from what is printed in this context

Rows go to stderr, so that a program's stdout stays what it is. No thread draws them, and no stream
is replaced: a row is there only while the program waits in a call of nanotf, and so prints nothing.
What other threads of the program print meanwhile, or C code, is written over the last row, which is
drawn again below it.

Rich, which comes with Keras 3, draws. Without it, and without a terminal, rows are lines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nanotf.console.lines import PREFIX, logger, say

TICK_SECONDS = 0.25  # between two calls of `tick`
LOG_SECONDS = 10.0  # between two lines of a row in a log, at least
BAR_COLUMNS = 20

_GONE = (OSError, ValueError)  # the terminal has gone, or the program has closed its stream


class ScreenRow(Protocol):
    """The words for something that takes time. Any thread may call a method."""

    label: str  # a word that comes first; "" for nanotf's prefix alone
    logged: float | None  # when a log got its last line; None before the first

    def fraction(self) -> float | None:
        """Returns the part that is done, 0 to 1; None if that is unknown."""

    def text(self) -> str:
        """Returns what there is to say now."""


class Screen:
    """The rows of this process."""

    def __init__(self) -> None:
        # A destructor may print at any time, even while a row is drawn: hence an RLock.
        self._lock = threading.RLock()
        self._rows: list[ScreenRow] = []
        self._stream: Any = None  # the stderr of `_place`
        self._place: _Log | _Terminal | None = None

    @contextlib.contextmanager
    def showing(self, row: ScreenRow) -> Iterator[None]:
        """Shows a row in this context, and in one inside it."""
        if row in self._rows:
            yield
            return
        try:
            with self.above():
                self._rows.append(row)
            yield
        finally:
            with self.above():
                if row in self._rows:
                    self._rows.remove(row)

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Takes the rows away in this context, and draws them again after it."""
        with self._lock:
            self.hide()
            try:
                yield
            finally:
                self._draw()

    def hide(self) -> None:
        """Takes the rows away until the next `tick`."""
        with self._lock:
            if self._place is not None:
                with contextlib.suppress(*_GONE):
                    self._place.erase()

    def tick(self) -> None:
        """Shows what the rows say now."""
        with self._lock:
            self._draw()

    def print_above(self, text: str) -> None:
        """Prints a line with nanotf's prefix to stderr."""
        with self.above(), contextlib.suppress(*_GONE):  # the program needs no line
            if sys.stderr is not None:
                say(text, sys.stderr)

    def print_last(self, row: ScreenRow, text: str) -> None:
        """Ends a row, and prints what stays of it."""
        with self.above():
            if row in self._rows:
                self._rows.remove(row)
            if (place := self._found()) is not None:
                with contextlib.suppress(*_GONE):  # the program needs no row
                    place.print(row, text)

    def _draw(self) -> None:
        if self._rows and (place := self._found()) is not None:
            with contextlib.suppress(*_GONE):
                place.draw(self._rows)

    def _found(self) -> _Log | _Terminal | None:
        """Returns the place for rows; None if there is no stderr, as in a daemon."""
        if getattr(sys.stderr, "closed", sys.stderr is None):
            return None
        if self._stream is not sys.stderr:
            self._stream = sys.stderr
            self._place = _place_of(self._stream)
        return self._place

    def leave_to_parent(self) -> None:
        """Forgets the rows in a child, where nobody may release the copy of the lock."""
        self.__init__()  # type: ignore[misc]


screen = Screen()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=screen.leave_to_parent)


def _hide_rows(record: logging.LogRecord) -> bool:
    screen.hide()  # handlers print the record after this filter
    return True


logger.addFilter(_hide_rows)


def _place_of(stream: Any) -> _Log | _Terminal:
    console = _console_of(stream)
    return _Log(stream) if console is None else _Terminal(console, stream)


def _console_of(stream: Any) -> Any:
    """Returns rich's console if a stream's rows can be redrawn; else None."""
    is_terminal = getattr(stream, "isatty", bool)()
    # Rich draws in a notebook with ipywidgets, and warns if they are missing.
    may_be_notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets")
    if not (is_terminal or may_be_notebook) or importlib.util.find_spec("rich") is None:
        return None  # before rich is imported, which takes time
    from rich.console import Console

    console = Console(file=stream)
    return console if console.is_jupyter or (is_terminal and console.is_interactive) else None


class _Log:
    """Prints rows as lines: the first, the last, and between them one in `LOG_SECONDS`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def draw(self, rows: Sequence[ScreenRow]) -> None:
        for row in rows:
            now = time.monotonic()
            if row.logged is None or now - row.logged >= LOG_SECONDS:
                row.logged = now
                self.print(row, row.text())

    def erase(self) -> None:
        """Does nothing: lines stay."""

    def print(self, row: ScreenRow, text: str) -> None:
        say(f"{row.label} {text}".lstrip(), self._stream)


class _Terminal:
    """Draws rows at the bottom of a terminal, or in a notebook.

    Args:
        console: rich's, of `stream`.
    """

    def __init__(self, console: Any, stream: Any) -> None:
        self._console, self._stream = console, stream
        self._live: Any = None  # rich's, while rows are drawn
        self._rows: Sequence[ScreenRow] = ()
        self._spinner = _spinner(console.options.ascii_only)

    def draw(self, rows: Sequence[ScreenRow]) -> None:
        from rich.live import Live

        self._rows = rows
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=lambda: _picture(
                    self._console, self._spinner, [(row, row.text()) for row in self._rows]
                ),
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed now could not
        self._live.refresh()
        if not self._console.is_jupyter:
            # What is not printed by nanotf is written over a row instead of after it.
            self._stream.write("\r")
            self._stream.flush()

    def erase(self) -> None:
        # Another one draws: this one would first go up by as many lines as it has drawn.
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def print(self, row: ScreenRow, text: str) -> None:
        self._console.print(_picture(self._console, self._spinner, [(row, text)]))


@functools.cache
def _spinner(ascii_only: bool) -> Any:
    from rich.spinner import Spinner

    return Spinner("line" if ascii_only else "dots")


def _picture(console: Any, spinner: Any, texts: Sequence[tuple[ScreenRow, str]]) -> Any:
    """Returns what rich draws: for each row a label, a bar or a sign of life, and a text."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines = []
    for row, text in texts:
        line, done = Table.grid(padding=(0, 1)), row.fraction()
        label, shown = row.label or PREFIX.rstrip(), Text(text, no_wrap=True)
        bar = spinner if done is None else ProgressBar(1.0, done, BAR_COLUMNS)
        width = len(label) + (1 if done is None else BAR_COLUMNS) + len("  ")
        # Rich would shorten the label and the bar, too.
        shown.truncate(max(1, console.width - width), overflow="crop")
        line.add_row(Text(label, no_wrap=True), bar, shown)
        lines.append(line)
    return Group(*lines)
