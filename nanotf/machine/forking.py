"""Forks of a process whose libraries may have threads.

A fork has the calling thread alone. A lock that another thread held stays taken there, and its work
is never done. Libraries that expect forks end their threads before each one, and start them again
when they need them: OpenBLAS does, by pthread_atfork.
"""

from __future__ import annotations

import os
import pathlib
import time
import warnings

_LISTED_SECONDS = 0.1  # the kernel lists a thread for a moment after it was joined


def fork() -> int:
    """Forks this process, as `os.fork` does, without Python's warning about threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def has_kept_threads() -> bool:
    """Returns True if this process, just after a fork, has threads that the fork does not have.

    For a process whose only thread of Python's is the caller. Linux only.
    """
    deadline = time.monotonic() + _LISTED_SECONDS
    while len(list(pathlib.Path("/proc/self/task").iterdir())) > 1:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.001)
    return False
