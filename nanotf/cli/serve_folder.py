"""The folder of a running `nanotf serve`, and those that killed servers have left.

A server holds the lock of its folder. The lock's file gets its name after it is locked, so a folder
that has such a file, whose lock nobody holds, is that of a server that was killed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator

from nanotf.wire import files

_PREFIX = "nanotf-serve-"
_LOCK = "server.lock"


@contextlib.contextmanager
def private_folder() -> Iterator[pathlib.Path]:
    """Yields a new folder in the temporary directory, which is removed afterwards.

    The folders of this user's servers that were killed are removed first.

    Raises:
        OSError: The disk is full or not writable, or the file system has no locks.
    """
    _remove_abandoned()
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix=_PREFIX)
        folder = pathlib.Path(temporary.name)
        unnamed = folder / f".{_LOCK}"
        with temporary:
            lock = files.Lock(unnamed)
            stack.callback(lock.release)  # after the folder is gone: nobody else removes it, too
            unnamed.rename(folder / _LOCK)
            yield folder


def _remove_abandoned() -> None:
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Other servers start, end and remove such folders meanwhile.
        with contextlib.suppress(FileNotFoundError, files.LockHeld):
            # Anyone may make such names in /tmp; a link must not lead to other files.
            if _is_own(folder, stat.S_ISDIR) and _is_own(folder / _LOCK, stat.S_ISREG):
                with files.Lock(folder / _LOCK):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_own(path: pathlib.Path, is_kind: Callable[[int], bool]) -> bool:
    """Returns True for what belongs to this user and is of a kind; links are of another one."""
    found = path.lstat()
    return found.st_uid == os.getuid() and is_kind(found.st_mode)
