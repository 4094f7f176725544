"""The log of a worker's output, as the parent reads it.

Reads NANOTF_WORKER_LOGS, which the supervisor of a job sets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import tempfile

from nanotf.console import logger
from nanotf.wire.channel import NO_DESCRIPTORS
from nanotf.wire.memory_files import above_standard, anonymous_file

TAIL_LINES = 20
FOLDER_VARIABLE = "NANOTF_WORKER_LOGS"
CRASH = "Fatal Python error:"  # the first words of faulthandler
MAX_BYTES = 2**24  # limit of a log; a worker may print at every step, for days
KEPT_BYTES = 2**16  # kept of a log beyond the limit; more than anyone reads in an error


class WorkerLog:
    """A file without a name. A worker writes to it, and its parent reads the end.

    It is in memory if no disk can hold it. In a job it is a file of the job's logs.

    Args:
        fd: the descriptor of a log that another process has created; this object
            owns it from now on. None creates a log.
        name: the file's name in the folder that NANOTF_WORKER_LOGS names. None, or no such folder:
            the file has no name.

    Raises:
        OSError: This process has no file descriptors left.
    """

    def __init__(self, fd: int | None = None, name: str | None = None) -> None:
        self._fd = _open(name) if fd is None else fd
        self._begin = self.size()  # where `tail` begins; an earlier worker may have written
        # Parent and worker share the descriptor's position. The parent may set it only because
        # the worker always writes at the end.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)

    def fileno(self) -> int:
        """Returns the descriptor, for the worker's standard output."""
        return self._fd

    def size(self) -> int:
        """Returns the number of bytes that it has now."""
        return os.fstat(self._fd).st_size

    def since(self, position: int) -> str:
        """Returns up to 64 KiB of the text that follows the first `position` bytes."""
        return os.pread(self._fd, KEPT_BYTES, position).decode(errors="replace").strip()

    def begin_here(self) -> None:
        """Excludes the text so far from `tail`: TensorFlow's messages at its start."""
        self._begin = self.size()

    def tail(self) -> str:
        """Returns the last lines, or after a crash the top of its Python stack."""
        text = os.pread(self._fd, KEPT_BYTES, max(self._begin, self.size() - KEPT_BYTES))
        lines = text.decode(errors="replace").splitlines()
        crash = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
        if crash:
            return "\n".join(lines[max(0, crash[-1] - 5) : crash[-1] + TAIL_LINES])
        return "\n".join(lines[-TAIL_LINES:])

    def trim(self) -> None:
        """Drops all but the end of a log that has become long.

        Text that the worker writes at this very moment may be lost.
        """
        with contextlib.suppress(OSError):  # a disk that is full or gone must not end the call
            if self.size() > MAX_BYTES:
                text = os.pread(self._fd, KEPT_BYTES, self.size() - KEPT_BYTES)
                os.ftruncate(self._fd, 0)
                self._begin = 0
                os.write(self._fd, text)

    def close(self) -> None:
        """Closes the parent's end. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def given_folder() -> pathlib.Path | None:
    """Makes the folder that NANOTF_WORKER_LOGS names; None without one, or if that fails."""
    given = os.environ.get(FOLDER_VARIABLE)
    if not given:
        return None
    folder = pathlib.Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn(folder, error)
        return None
    return folder


def _warn(path: pathlib.Path, error: OSError) -> None:
    if error.errno in NO_DESCRIPTORS:
        raise error
    logger.warning("Logs cannot be written to %s: %s.", path, error)


def _open(name: str | None) -> int:
    folder = None if name is None else given_folder()
    if folder is not None and name is not None:
        try:
            with (folder / name).open("a+b") as file:
                return above_standard(os.dup(file.fileno()))
        except OSError as error:
            _warn(folder / name, error)
    try:
        with tempfile.TemporaryFile() as file:
            return above_standard(os.dup(file.fileno()))
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        logger.warning("The workers' logs are kept in memory: %s.", error)
        return anonymous_file(0, fixed=False)
