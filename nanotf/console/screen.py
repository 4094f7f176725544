"""Shows rows that change: at the bottom of a terminal, or as lines of a log.

    program        print()  ->  _Above (sys.stdout, sys.stderr)   appears above the rows
    rows           add, change, remove
                     _Terminal    draws all rows, again and again, with rich
                     _Log         from time to time prints a row as a line

Rows go to stderr, so that a program's stdout stays what it is. While a terminal shows rows, it also
has the program's output: `_Above` takes the rows away before text is written, and draws them again
after a whole line. Text that ends in the middle of a line, such as Keras's bars, keeps the rows
away until the line ends, and for a while the text of other threads, too. Text of C code, and of a
logging handler that has kept an earlier `sys.stderr`, does not come by here: it is written over the
last row, which is drawn again below it.

Rich comes with Keras 3. Without it, and without a terminal, rows are lines.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from nanotf.console.lines import PREFIX, say

TICK_SECONDS = 0.25  # between two drawings, at most
DRAW_SECONDS = 0.1  # between two drawings, at least: a program that prints much waits for no more
OPEN_SECONDS = 0.5  # how long other threads' text waits for a line to end
LOG_SECONDS = 10.0  # between two lines of a row in a log, at least
BAR_COLUMNS = 20

_GONE = (OSError, ValueError)  # the terminal has gone, or the program has closed its stream


class ScreenRow(Protocol):
    """The words for something that takes time. Any thread may call a method."""

    label: str  # a word that comes first; "" for nanotf's prefix alone

    def fraction(self) -> float | None:
        """Returns the part that is done, 0 to 1; None if that is unknown."""

    def text(self) -> str:
        """Returns what there is to say now."""

    def last_text(self) -> str:
        """Returns what stays when the row ends; "" if nothing does."""


class Screen:
    """The rows of this process.

    Attributes:
        lock: guards all that belongs to rows. A destructor may print at any time, even while a row
            is drawn: hence an RLock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._place: _Log | _Terminal | None = None  # while there are rows

    def add(self, row: ScreenRow) -> None:
        """Shows a row from now on. Does nothing in a process without a stderr, such as a daemon."""
        with self.lock:
            if self._place is None and not getattr(sys.stderr, "closed", sys.stderr is None):
                self._place = _place_of(sys.stderr)
            if self._place is not None:
                self._place.add(row)

    def change(self, row: ScreenRow) -> None:
        """Shows what a row says now, sooner or later."""
        with self.lock:
            if self._place is not None and row in self._place.rows:
                self._place.change(row)

    def remove(self, row: ScreenRow) -> None:
        """Ends a row. Does nothing if it is not shown."""
        with self.lock:
            place = self._place
            if place is None or row not in place.rows:
                return
            place.remove(row)
            if place.rows:
                return
            self._place = None
            place.close()
        place.wait()  # without the lock, which its thread may take once more

    def remove_all(self) -> None:
        """Ends all rows: the process ends, though nobody has read an iterator to its end."""
        while (place := self._place) is not None:
            self.remove(place.rows[0])

    def leave_to_parent(self) -> None:
        """Forgets the rows in a child, where nobody may release the copy of the lock."""
        self.lock = threading.RLock()
        if isinstance(self._place, _Terminal):
            self._place.leave()
        self._place = None


screen = Screen()
atexit.register(screen.remove_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=screen.leave_to_parent)


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
        self.rows: list[ScreenRow] = []
        self._stream = stream
        self._said: dict[int, float] = {}  # by a row's identity, when its last line was printed

    def add(self, row: ScreenRow) -> None:
        self.rows.append(row)
        self._say(row, row.text())

    def change(self, row: ScreenRow) -> None:
        if time.monotonic() - self._said[id(row)] >= LOG_SECONDS:
            self._say(row, row.text())

    def remove(self, row: ScreenRow) -> None:
        self.rows.remove(row)
        if row.last_text():
            self._say(row, row.last_text())
        del self._said[id(row)]

    def _say(self, row: ScreenRow, text: str) -> None:
        self._said[id(row)] = time.monotonic()
        with contextlib.suppress(*_GONE):  # the program needs no row
            say(f"{row.label} {text}".lstrip(), self._stream)

    def close(self) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Does nothing: it has no thread."""


class _Terminal:
    """Draws rows at the bottom of a terminal, or in a notebook.

    Args:
        console: rich's, of `stream`.
    """

    def __init__(self, console: Any, stream: Any) -> None:
        self.rows: list[ScreenRow] = []
        self._console, self._stream = console, stream
        self._live: Any = None  # rich's, while rows are drawn
        self._drawn = 0.0  # when
        # The thread whose text did not end its line, and when it was written; None after a line.
        self._open: tuple[int, float] | None = None
        self._held: list[tuple[int, Any, str]] = []  # other threads' text since, and its stream
        self._closed = threading.Event()
        self._replaced: dict[str, _Above] = {}
        self._spinner = _spinner(console.options.ascii_only)
        if not console.is_jupyter:  # there, rows are apart from the output
            for name in ("stdout", "stderr"):
                found = getattr(sys, name)
                if getattr(found, "isatty", bool)():
                    self._replaced[name] = _Above(self, found)
                    setattr(sys, name, self._replaced[name])
        self._thread = threading.Thread(target=self._tick, name="nanotf-screen", daemon=True)
        self._thread.start()

    def add(self, row: ScreenRow) -> None:
        self.rows.append(row)
        self._draw()

    def change(self, row: ScreenRow) -> None:
        self._draw_soon()

    def remove(self, row: ScreenRow) -> None:
        self.rows.remove(row)
        self._erase()
        if row.last_text():
            with self._unless_gone():
                self._end_line()
                self._write_held()
                self._end_line()
                self._console.print(self._picture([(row, row.last_text())]))
        if self.rows:
            self._draw()

    def print_above(self, stream: Any, text: str) -> None:
        """Writes a text of the program to one of its streams."""
        with screen.lock:
            if not text or self._closed.is_set():
                stream.write(text)
                return
            thread = threading.get_ident()
            if self._open is not None and self._open[0] != thread:
                self._held.append((thread, stream, text))
                return
            self._erase()
            self._write(thread, stream, text)
            if self._open is None:
                self._write_held()
            self._draw_soon()

    def _write(self, thread: int, stream: Any, text: str) -> None:
        stream.write(text)
        stream.flush()  # the other stream shows the same terminal
        self._open = None if text.endswith("\n") else (thread, time.monotonic())

    def _write_held(self) -> None:
        held, self._held = self._held, []
        for each in held:
            self._write(*each)

    def close(self) -> None:
        """Ends the drawing."""
        with self._unless_gone():
            self._end_line_of_others()
        self.leave()
        for name, ours in self._replaced.items():
            if getattr(sys, name) is ours:  # the program may have put its own there meanwhile
                setattr(sys, name, ours.stream)

    def leave(self) -> None:
        """Passes what is printed on without another look, from now on."""
        self._closed.set()

    def wait(self) -> None:
        """Waits for the thread."""
        self._thread.join()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            with screen.lock:
                if self._open is not None and time.monotonic() - self._open[1] > OPEN_SECONDS:
                    with self._unless_gone():
                        self._end_line_of_others()
                if not self._closed.is_set():
                    self._draw()

    def _draw_soon(self) -> None:
        if time.monotonic() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        if self._open is None:
            self._drawn = time.monotonic()
            with self._unless_gone():
                self._refresh()
                if not self._console.is_jupyter:
                    # C code, such as TensorFlow's logging, writes over a row instead of after it.
                    self._stream.write("\r")
                    self._stream.flush()

    @contextlib.contextmanager
    def _unless_gone(self) -> Iterator[None]:
        """Ends the drawing if the terminal has gone: the program runs on, as it may with nohup."""
        try:
            yield
        except _GONE:
            self.leave()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
            return
        from rich.live import Live

        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: self._picture([(row, row.text()) for row in self.rows]),
        )
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # a process that is killed now could not

    def _erase(self) -> None:
        # Another one draws: this one would first go up by as many lines as it has drawn.
        live, self._live = self._live, None
        if live is not None:
            with self._unless_gone():
                live.stop()

    def _end_line_of_others(self) -> None:
        """Ends a line that keeps the text of other threads away."""
        if self._held:
            self._end_line()
            self._write_held()

    def _end_line(self) -> None:
        if self._open is not None:
            self._write(0, self._stream, "\n")

    def _picture(self, texts: list[tuple[ScreenRow, str]]) -> Any:
        """Returns what rich draws: for each row a label, a bar or a sign of life, and a text."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        lines = []
        for row, text in texts:
            line, done = Table.grid(padding=(0, 1)), row.fraction()
            label, shown = row.label or PREFIX.rstrip(), Text(text, no_wrap=True)
            bar = self._spinner if done is None else ProgressBar(1.0, done, BAR_COLUMNS)
            width = len(label) + (1 if done is None else BAR_COLUMNS) + len("  ")
            # Rich would shorten the label and the bar, too.
            shown.truncate(max(1, self._console.width - width), overflow="crop")
            line.add_row(Text(label, no_wrap=True), bar, shown)
            lines.append(line)
        return Group(*lines)


@functools.cache
def _spinner(ascii_only: bool) -> Any:
    from rich.spinner import Spinner

    return Spinner("line" if ascii_only else "dots")


class _Above:
    """A stream of the program while a terminal shows rows.

    Args:
        stream: `sys.stdout` or `sys.stderr` before.
    """

    def __init__(self, place: _Terminal, stream: Any) -> None:
        self._place, self.stream = place, stream

    def write(self, text: str) -> int:
        """Writes above the rows."""
        self._place.print_above(self.stream, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
