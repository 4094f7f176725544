"""A worker's log: the parent's end."""

from __future__ import annotations

import fcntl
import os
import tempfile

from nanotf.console import logger
from nanotf.wire.channel import NO_DESCRIPTORS
from nanotf.wire.memory_files import above_standard, anonymous_file

TAIL_LINES = 20
CRASH = "Fatal Python error:"  # as faulthandler begins
MAX_BYTES = 2**24  # of a log; a worker may print at every step, for days
KEPT_BYTES = 2**16  # of one that has grown beyond; more than anybody reads in an error


class WorkerLog:
    """A file without a name that a worker writes to, and of which its parent reads the end.

    In memory where no disk takes it.

    Args:
        fd: int or None, the descriptor of one that another process has made, which it owns from
            now on; None makes one.

    Raises:
        OSError: This process has no file descriptors left.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = _open() if fd is None else fd
        self._begin = 0  # of what `tail` shows
        # Parent and worker share the descriptor's position, which is the parent's to set
        # only as long as the worker always writes at the end.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)

    def fileno(self) -> int:
        """The descriptor, for the worker's standard output."""
        return self._fd

    def size(self) -> int:
        """Returns how many bytes it has now."""
        return os.fstat(self._fd).st_size

    def since(self, position: int) -> str:
        """Returns what was written after the first `position` bytes, the first 64 KiB of it."""
        return os.pread(self._fd, KEPT_BYTES, position).decode(errors="replace").strip()

    def begin_here(self) -> None:
        """Leaves what was written so far out of `tail`: what TensorFlow says when it starts."""
        self._begin = self.size()

    def tail(self) -> str:
        """The last lines; of a crash, the top of its Python stack."""
        text = os.pread(self._fd, KEPT_BYTES, max(self._begin, self.size() - KEPT_BYTES))
        lines = text.decode(errors="replace").splitlines()
        crash = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
        if crash:
            return "\n".join(lines[max(0, crash[-1] - 5) : crash[-1] + TAIL_LINES])
        return "\n".join(lines[-TAIL_LINES:])

    def trim(self) -> None:
        """Drops all but the end of a log that has become long.

        What the worker writes at this very moment may be lost.
        """
        if self.size() > MAX_BYTES:
            text = os.pread(self._fd, KEPT_BYTES, self.size() - KEPT_BYTES)
            os.ftruncate(self._fd, 0)
            self._begin = 0
            os.write(self._fd, text)

    def close(self) -> None:
        """Closes the parent's end; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open() -> int:
    try:
        with tempfile.TemporaryFile() as file:
            return above_standard(os.dup(file.fileno()))
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        logger.warning("The workers' logs are kept in memory: %s.", error)
        return anonymous_file(0, fixed=False)
