"""Memory files without names (`memfd_create`), for shared memory and workers' logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import tempfile

from nanotf.errors import NanoError

STANDARD = (0, 1, 2)  # the descriptors of standard input, output and error


def above_standard(fd: int) -> int:
    """Returns a descriptor, replaced by a higher one if it is 0, 1 or 2.

    In a process started without standard input, output and error (a daemon), the next files to
    be opened get those numbers. Libraries would print into them, and a child process would not
    find them.

    Args:
        fd: closed if it is 0, 1 or 2.
    """
    if fd > STANDARD[-1]:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STANDARD[-1] + 1)
    finally:
        os.close(fd)


def anonymous_file(nbytes: int, *, fixed: bool) -> int:
    """Creates memory without a name.

    Only a process that is given the descriptor can map it. The only other way in is
    `/proc/PID/fd`, which the file's mode closes to other users.

    Args:
        nbytes: size in bytes; they are zeros.
        fixed: whether the size is sealed: a file that shrinks under a mapping kills its readers
            with SIGBUS.

    Returns:
        A descriptor that child processes do not inherit.

    Raises:
        NanoError: The file-size limit, which also applies to memory files, is lower.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nanotf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:  # macOS: a temporary file that is already deleted
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    fd = above_standard(fd)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        if fixed:
            _seal_size(fd)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise _limited(nbytes) from error
        raise
    return fd


def _limited(nbytes: int) -> NanoError:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return NanoError(
        "Shared memory consists of files in memory, so the limit on the size of files applies "
        f"to it (RLIMIT_FSIZE). Received: a limit of {soft} bytes, but {nbytes} are needed. "
        "Raise it before Python starts: `ulimit -f unlimited`."
    )


def _seal_size(fd: int) -> None:
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
