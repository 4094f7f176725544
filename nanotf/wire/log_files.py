"""Logs: their owner writes whole lines, and any process reads those that are new.

The owner must not end because a disk is full for a while, nor lose what it had to say:
`HeldFile` keeps that until there is room.
"""

from __future__ import annotations

import functools
import io
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from nanotf.console import STREAMS, prefixed, say

_HELD_BYTES = 1 << 20  # of one file


class HeldFile:
    """A file that grows, of which a disk that takes nothing now gets the rest later.

    What cannot be written is held, in order. Beyond `_HELD_BYTES` lines are dropped, and a line
    in the file says how many.

    Args:
        opened: opens the file to append to it; called again after `close`.
    """

    def __init__(self, opened: Callable[[], int]) -> None:
        self._opened = opened
        self._descriptor = -1
        self._held = bytearray()
        self._dropped = 0  # lines, since the last held one

    def append(self, data: bytes) -> OSError | None:
        """Writes data, or holds them. Returns why they are held."""
        if self._dropped or len(self._held) + len(data) > _HELD_BYTES:
            self._dropped += data.count(b"\n")
        else:
            self._held += data
        return self.catch_up()

    def catch_up(self) -> OSError | None:
        """Writes what is held. Returns why some of it still is."""
        try:
            while self._held or self._dropped:
                if not self._held:
                    self._note_dropped()
                if self._descriptor < 0:
                    self._descriptor = self._opened()
                # A disk that has some room left takes a part.
                del self._held[: os.write(self._descriptor, self._held)]
        except OSError as error:
            return error
        return None

    def _note_dropped(self) -> None:
        text = f"{self._dropped} lines are missing here: there was no room to write them"
        self._held += f"{prefixed(text)}\n".encode()
        self._dropped = 0

    def size(self) -> int:
        """Returns the bytes of the open file."""
        return 0 if self._descriptor < 0 else os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Closes the file; what is held stays so."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LogFiles:
    """The logs that a supervisor writes. None of its methods fails, whatever the disk does.

    Args:
        limit: bytes of a log. A longer one gets the name `<name>.1`, instead of what had it, and
            begins anew. None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._files: dict[pathlib.Path, HeldFile] = {}
        self._limit, self._is_full = limit, False

    def write(self, path: pathlib.Path, line: bytes) -> None:
        """Appends a line to a log, at once or when there is room."""
        if path not in self._files:
            self._files[path] = HeldFile(functools.partial(_open, path))
        self._note(self._files[path].append(line))
        if self._limit is not None:
            self._begin_anew(path, self._limit)

    def _begin_anew(self, path: pathlib.Path, limit: int) -> None:
        try:
            if self._files[path].size() > limit:
                self._files[path].close()
                path.replace(_before(path))
        except OSError as error:
            self._note(error)

    def catch_up(self) -> OSError | None:
        """Writes what is held. Returns why some of it still is."""
        found = [error for file in self._files.values() if (error := file.catch_up()) is not None]
        self._note(found[0] if found else None)
        return found[0] if found else None

    def _note(self, error: OSError | None) -> None:
        """Says it once when the disk begins to take nothing."""
        was_full, self._is_full = self._is_full, error is not None
        if error is not None and not was_full:
            say(f"the log waits for room: {error}", sys.stderr)

    def close(self) -> None:
        """Closes the files; `write` and `catch_up` open them again."""
        for file in self._files.values():
            file.close()


def _open(path: pathlib.Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


class SpokenLog(io.RawIOBase):
    """Takes what this process says on its standard streams. Nothing that it says fails."""

    def __init__(self) -> None:
        super().__init__()
        # The launching process has opened the log as standard error, to append to it.
        self._file = HeldFile(lambda: os.dup(2))

    def install(self) -> None:
        """Makes `print` write whole lines to it."""
        for name in STREAMS:
            stream = io.TextIOWrapper(
                io.BufferedWriter(self), "utf-8", errors="backslashreplace", line_buffering=True
            )
            setattr(sys, name, stream)

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any) -> int:
        """Writes data, at once or when there is room."""
        content = bytes(data)
        self._file.append(content)
        return len(content)

    def catch_up(self) -> OSError | None:
        """Writes what is held. Returns why some of it still is."""
        return self._file.catch_up()


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
        self._held = b""  # what was read, and not returned yet

    def read(self) -> str:
        """Returns the whole lines that were written since the last call."""
        self._held += self._read_rest()
        self._held += self._read(self._path)  # what was read is kept if this fails
        data, self._held = self._held, b""
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
