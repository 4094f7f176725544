"""Files that nanotf writes: whole or not at all, by one process at a time, doubted when read.

A disk may be full, a process may end at any line, and anybody may have changed a file since.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterator
from typing import IO, Any

from nanotf.errors import NanoError

PRIVATE = 0o600
FULL = (errno.ENOSPC, errno.EDQUOT)  # of an `OSError` that a full disk raises
GONE = (FileNotFoundError, NotADirectoryError)  # of a path that somebody has deleted
_LONGEST_NAME = 200  # bytes, so that a part's name has no more than the 255 of file systems
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


class Damaged(NanoError):
    """A file is incomplete, has changed since it was written, or nanotf has not written it."""


@contextlib.contextmanager
def new_file(path: pathlib.Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Replaces a file in one step: yields an empty one, which gets the name at the end.

    A reader sees the old content or the new one, also after a crash of the machine.

    Args:
        mode: who may read and write it, less what the umask forbids.

    Raises:
        OSError: The disk is full or not writable. The old file is as it was.
    """
    part = _part_of(path)
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "w+b") as file:  # noqa: PTH123
            yield file
            flush(file)  # before the rename: a crash must not leave the new name without content
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _part_of(path: pathlib.Path) -> pathlib.Path:
    """Returns the name of what is to become `path`. Nobody else has it, in no other container."""
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME])
    return path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}.part")


def write_text(path: pathlib.Path, text: str, mode: int = 0o666) -> None:
    """Replaces a file in one step, as `new_file`; the text is written in UTF-8."""
    with new_file(path, mode) as file:
        file.write(text.encode())


def flush(file: Any) -> None:
    """Waits until the disk has what was written to a file."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: pathlib.Path) -> None:
    """Waits until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a folder with its content: yields an empty one, which gets its name at the end.

    All files in it are flushed first. A folder that has the name already is exchanged for it in one
    step, and then deleted: a reader finds the old one or the new one. Where the kernel or the file
    system cannot exchange names, it is renamed before: between the two steps a reader finds none,
    and a kill at that moment leaves the old one as `.NAME.*.old` and the new one as `.NAME.*.part`.

    Args:
        path: its parent exists.

    Raises:
        OSError: The disk is full or not writable. What had the name is as it was.
    """
    made = _part_of(path)
    made.mkdir()
    try:
        yield made
        for folder, _, names in os.walk(made):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:  # noqa: PTH118, PTH123
                    os.fsync(file.fileno())
            flush_folder(pathlib.Path(folder))
        _take_place(made, path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    flush_folder(path.parent)


def _take_place(made: pathlib.Path, path: pathlib.Path) -> None:
    if _exchange(made, path):
        shutil.rmtree(made, ignore_errors=True)
        return
    old = made.with_name(f"{made.name}.old")
    with contextlib.suppress(FileNotFoundError):
        path.rename(old)
    try:
        made.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Exchanges two names in one step, by renameat2 of Linux. Returns False if it cannot."""
    # glibc has it since 2.28, the kernel since 3.15, and not all file systems do.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def write_json(
    path: pathlib.Path, value: Any, *, indent: int | None = None, mode: int = 0o666
) -> None:
    """Replaces a JSON file in one step. Raises `OSError` as `write_text` does."""
    write_text(path, json.dumps(value, indent=indent) + "\n", mode)


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file.

    Raises:
        OSError: There is none, or it cannot be read.
        Damaged: It is not JSON.
    """
    with doubting(path):
        return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def doubting(path: pathlib.Path) -> Iterator[None]:
    """Makes `Damaged` of what goes wrong in this context, where content of a file is understood.

    Content may be anything: there, every exception means that it is not what nanotf writes.

    Args:
        path: the file, for the error.
    """
    try:
        yield
    except (OSError, MemoryError, NanoError):  # not the content's fault, or it says what is wrong
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise Damaged(f"{path} is not as nanotf writes it: {why}") from error


class LockHeld(Exception):
    """Somebody else has a lock. The text says who, if it is known."""


class Lock:
    """The right to use what a file stands for, until `release` or the end of the process.

    The lock (`flock`) belongs to this opening of the file: the same process gets no second one, and
    keeps its own whatever else it opens and closes.

    Args:
        path: the file; it is made if it does not exist, and names the holder.
        waits: whether to wait until others have released it.

    Raises:
        LockHeld: Somebody else has it.
        OSError: The file cannot be opened, or the file system has no locks.
    """

    def __init__(self, path: pathlib.Path, *, waits: bool = False) -> None:
        self._owner, self._path = os.getpid(), path  # a fork must not release its parent's lock
        self._descriptor = -1
        try:
            while not self._is_of_path():  # who held it may have removed the file
                self._close()
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            with contextlib.suppress(OSError):  # on a full disk it names nobody
                os.ftruncate(self._descriptor, 0)
                holder = f"process {os.getpid()} on {socket.gethostname()}"
                os.pwrite(self._descriptor, holder.encode(), 0)
        except BlockingIOError:
            said = os.pread(self._descriptor, 1000, 0).decode(errors="replace")
            self._close()
            raise LockHeld(said or "another process") from None
        except BaseException:
            self._close()
            raise
        _locks.add(self)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_of_path(self) -> bool:
        if self._descriptor < 0:
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        return False

    def release(self, *, removes: bool = False) -> None:
        """Lets others have it; a second call does nothing.

        Args:
            removes: whether to remove the file, too.
        """
        if self._descriptor >= 0 and self._owner == os.getpid():
            if removes:  # while it is still locked: afterwards it may be somebody else's
                self._path.unlink(missing_ok=True)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a fork may not have closed its copy yet
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    """Closes a child's copies: it would keep the locks beyond its parent's end."""
    for lock in list(_locks):
        lock._close()


os.register_at_fork(after_in_child=_after_fork)
