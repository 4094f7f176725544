"""The end of this process: what runs then, and not at a fork's end, and whose end brings it.

A fork inherits what `atexit` has to call. A script that forks, whose child ends by `sys.exit`,
would so leave a group or end a run for its parent, which still needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Loaded here, since a process between fork and exec should not import.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def at_own_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Calls a function when this process ends, as `atexit.register` does.

    Returns:
        What `atexit.unregister` takes.
    """
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            function()

    return atexit.register(call)


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends for any reason.

    Linux only. Elsewhere the end of a pipe or of a channel is noticed instead.

    Args:
        parent: the parent's process id.
    """
    if _libc is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(1)


def prctl(option: int, value: Any) -> None:
    """Sets something of this process, where the kernel is Linux and lets it."""
    if _libc is not None:
        with contextlib.suppress(OSError, AttributeError):
            _libc.prctl(option, value, 0, 0, 0)
