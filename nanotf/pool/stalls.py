"""Timeouts for workers that make no progress, and the code that notices them.

Every wait has a watcher:

| wait | watcher |
| --- | --- |
| a rank, in a collective of transport "shm" | the rank itself: the group's deadline |
| a rank, in a step with transport "grpc", whose collectives wait forever | `StepWatch` |
| a rank of a `@nano` function, for a rank that took another path | the parent: `divergence` |
| the parent, for the rest of the ranks at a hook or at the end of a call | `Pool.check_progress` |
| any process, for a process that a signal has stopped | `Pool.check_progress` |
| none: a rank is busy, or hangs, by itself | `Pool.check_progress` warns; see `silence` |
| the parent, for a rank to read | not needed: threads write, see `outbox` |

All use the same timeout, NANOTF_STALL_SECONDS. It must not be short: ranks wait for each
other while one of them compiles, or is swapped in. The parent's time in callbacks and in the user's
data does not count, since all workers wait for it equally. Only the parent knows if a step waits
for data (`StreamWriter.owes`).
"""

from __future__ import annotations

import psutil

from nanotf.pool import settings

STALL_SECONDS = 600.0
STALL_VARIABLE = "NANOTF_STALL_SECONDS"


def stall_seconds() -> float:
    """Returns how long a worker may keep others waiting: NANOTF_STALL_SECONDS, default 600 s.

    Raises:
        NanoError: The variable is not a number above 0.
    """
    return settings.seconds(STALL_VARIABLE, STALL_SECONDS)


def is_stopped(pid: int) -> bool:
    """Returns True if a signal (SIGSTOP, a debugger) has stopped a process."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:  # it has ended
        return False
