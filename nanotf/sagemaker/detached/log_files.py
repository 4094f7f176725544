"""Logs: the supervisor writes whole lines, and any process reads those that are new."""

from __future__ import annotations

import os
import pathlib
import sys

from nanotf.console import say


class LogFiles:
    """The logs that a supervisor writes. On a full disk they lack lines; one message says so."""

    def __init__(self) -> None:
        self._open: dict[pathlib.Path, int] = {}
        self._is_full = False

    def write(self, path: pathlib.Path, line: bytes) -> None:
        """Appends a line to a log."""
        try:
            if path not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._open[path] = os.open(path, flags, 0o644)
            os.write(self._open[path], line)
        except OSError as error:
            self.note_full(error)

    def note_full(self, error: OSError) -> None:
        """Says that something could not be written; the programs continue, and so must readers."""
        if not self._is_full:
            say(f"the log is incomplete: {error}", sys.stderr)
        self._is_full = True

    def close(self) -> None:
        """Closes the files; `write` opens them again."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class LogTail:
    """Reads a log from where it has stopped.

    Args:
        path: the log; it need not exist yet.
        prefix: written before each line.
    """

    def __init__(self, path: pathlib.Path, prefix: str = "") -> None:
        self._path, self._prefix = path, prefix
        self._position = 0

    def read(self) -> str:
        """Returns the whole lines that were written since the last call."""
        if not self._path.exists():
            return ""
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        # The supervisor may be in the middle of a line; the rest of it comes with the next call.
        data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        text = data.decode(errors="replace")
        if not self._prefix:
            return text
        return "".join(f"{self._prefix}{line}" for line in text.splitlines(keepends=True))


def last_lines(path: pathlib.Path, characters: int) -> str:
    """Returns the end of a log; whole lines, if they are short.

    Args:
        characters: at most so many.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 4 * characters, 0))
            text = file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    if len(text) <= characters:
        return text
    last = text[-characters:]
    return last.partition("\n")[2] or last
