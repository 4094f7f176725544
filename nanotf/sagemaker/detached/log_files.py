"""Logs: the supervisor writes whole lines, and any process reads those that are new."""

from __future__ import annotations

import os
import pathlib
import sys

from nanotf.console import say


class LogFiles:
    """The logs that a supervisor writes. On a full disk they lack lines; one message says so.

    Args:
        limit: bytes of a log. A longer one gets the name `<name>.1`, instead of what had it, and
            begins anew. None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._open: dict[pathlib.Path, int] = {}
        self._limit, self._is_full = limit, False

    def write(self, path: pathlib.Path, line: bytes) -> None:
        """Appends a line to a log."""
        try:
            if path not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._open[path] = os.open(path, flags, 0o644)
            os.write(self._open[path], line)
            if self._limit is not None and os.fstat(self._open[path]).st_size > self._limit:
                os.close(self._open.pop(path))
                path.replace(_before(path))
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


def _before(path: pathlib.Path) -> pathlib.Path:
    """Returns the name of the part of a log before the present one."""
    return path.with_name(f"{path.name}.1")


class LogTail:
    """Reads a log from where it has stopped.

    Args:
        path: the log; it need not exist yet.
        prefix: written before each line.
    """

    def __init__(self, path: pathlib.Path, prefix: str = "") -> None:
        self._path, self._prefix = path, prefix
        self._position = 0
        self._inode: int | None = None  # of the file that was read last

    def read(self) -> str:
        """Returns the whole lines that were written since the last call."""
        data = self._read_rest() + self._read(self._path)
        text = data.decode(errors="replace")
        if not self._prefix:
            return text
        return "".join(f"{self._prefix}{line}" for line in text.splitlines(keepends=True))

    def _read_rest(self) -> bytes:
        """Returns the rest of a log that got another name since the last call."""
        if self._inode in (None, _inode(self._path)):
            return b""
        before = _before(self._path)
        rest = self._read(before) if _inode(before) == self._inode else b""
        self._position, self._inode = 0, None
        return rest

    def _read(self, path: pathlib.Path) -> bytes:
        try:
            with path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return b""
        # The supervisor may be in the middle of a line; the rest of it comes with the next call.
        data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        return data


def _inode(path: pathlib.Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


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
