"""Lets one `fit` at a time use a folder of checkpoints.

The lock is POSIX's, on a file in the folder: the system releases it when the process ends, however
it ends, and no child inherits it. Such a lock belongs to the process, which therefore also keeps a
list of its own. The file stays: if a process deleted it, another could lock the deleted one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import socket
import threading

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError

NAME = ".lock"
_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)

# The folders that processes have locked, by device and inode, with the process's pid: a forked
# child has a copy of its parent's list, not its locks.
_held: dict[tuple[int, int], int] = {}
_guard = threading.Lock()


class FolderLock:
    """The right to read and write the checkpoints of a folder.

    Args:
        folder: `pathlib.Path`, of a folder that exists.

    Raises:
        InvalidArgumentError: Another `fit`, in this process or another, has it.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._descriptor = -1
        status = folder.stat()
        self._key = (status.st_dev, status.st_ino)
        with _guard:
            # To open and close the file would release the lock that this process has.
            if _held.get(self._key) == os.getpid():
                self._refuse(f"another fit in this process (pid {os.getpid()})")
            self._descriptor = self._locked()
            _held[self._key] = os.getpid()

    def _locked(self) -> int:
        """Returns the descriptor of the locked file, which names this process."""
        descriptor = os.open(self._folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_ELSEWHERE:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
                self._refuse(holder or "another process")
            # Some file systems of clusters have no locks.
            logger.warning(
                "The folder %s cannot be locked (%s). Start no other training that writes its "
                "checkpoints there.",
                self._folder,
                error,
            )

    def _refuse(self, holder: str) -> None:
        raise InvalidArgumentError(
            "A folder of checkpoints serves one fit at a time. Received: resume="
            f"'{self._folder}', which {holder} uses. Wait until that ends, or pass another folder."
        )

    def release(self) -> None:
        """Lets others use the folder; a second call does nothing."""
        with _guard:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                del _held[self._key]
