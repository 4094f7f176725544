"""Workers that make no progress: how long the others wait, and the report then.

Every wait has somebody who notices:

| who waits | who notices |
| --- | --- |
| a rank, in a collective of transport "shm" | the rank itself: the group's deadline |
| a rank, in a step with transport "grpc", whose collectives wait forever | `worker.watch.Watch` |
| a rank of a `@nano` function, for one that has taken another path | the parent: `divergence` |
| the parent, for the rest of the ranks at a hook or at the end of a job | `Pool.check_progress` |
| anybody, for a process that a signal has stopped | `Pool.check_progress` |
| nobody: a rank is busy, or hangs, by itself | `Pool.check_progress` warns; see `silence` |
| the parent, for a rank to read | nobody has to: threads write, see `outbox` |

The time is the same for all, NANOTF_STALL_SECONDS. It may not be short: ranks wait for each
other while one of them compiles, or is swapped in. What a callback or the user's data take in the
parent does not count, since all workers wait for that alike; only the parent knows whether a step
waits for it (`StreamWriter.owes`).
"""

from __future__ import annotations

import pathlib

from nanotf.pool import settings

STALL_SECONDS = 600.0
STALL_VARIABLE = "NANOTF_STALL_SECONDS"


def stall_seconds() -> float:
    """Returns how long a worker may keep others waiting: NANOTF_STALL_SECONDS, 600 by default.

    Raises:
        NanoError: The variable is not a number above 0.
    """
    return settings.seconds(STALL_VARIABLE, STALL_SECONDS)


def is_stopped(pid: int) -> bool:
    """Returns True if a signal has stopped a process (SIGSTOP). False without /proc."""
    try:
        line = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The name in parentheses may contain anything, a parenthesis included.
    return line.rpartition(")")[2].split()[:1] in (["T"], ["t"])
