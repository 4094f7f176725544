"""The state of this process's threads."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator

_RUNS = ("R", "D")  # runs or waits for a core; waits for a disk

_services: set[int] = set()  # native identifiers of threads that `as_service` excludes


@contextlib.contextmanager
def as_service() -> Iterator[None]:
    """Excludes the calling thread from `others_run`: it does nothing that the program waits for."""
    own = threading.get_native_id()
    _services.add(own)
    try:
        yield
    finally:
        _services.discard(own)


def others_run() -> bool:
    """Returns True if a thread, neither the caller nor a service, runs or waits for a core.

    False where the system does not tell: outside Linux.
    """
    excluded = {threading.get_native_id(), *_services}
    for task in pathlib.Path("/proc/self/task").glob("[0-9]*"):
        if int(task.name) in excluded:
            continue
        try:
            line = (task / "stat").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        # The name in parentheses may contain anything, a parenthesis included.
        if line.rpartition(")")[2].split()[0] in _RUNS:
            return True
    return False
