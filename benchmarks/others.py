"""Measures how much of the machine other programs use: figures taken under load mean little."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import psutil


class Others:
    """Context manager that measures the share of all cores used by other programs.

    Args:
        pids: sequence of int; these, their descendants and this process do not count. A process
            that ends before the second reading counts.

    Attributes:
        share: float, 0 to 1.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = [os.getpid(), *pids]
        self.share = 0.0

    def __enter__(self) -> Others:
        self._before = (time.monotonic(), _busy(), _own(self.pids))
        return self

    def __exit__(self, *_: object) -> None:
        begin, busy, own = self._before
        cores = psutil.cpu_count() or 1
        used = (_busy() - busy) - (_own(self.pids) - own)
        self.share = max(0.0, used / (cores * max(time.monotonic() - begin, 1e-3)))


def _busy() -> float:
    """Returns CPU seconds used since the machine started."""
    times = psutil.cpu_times()
    # Linux counts the time of programs with a positive nice value apart from `user`.
    niced = getattr(times, "nice", 0.0)
    return float(times.user + niced + times.system + getattr(times, "irq", 0.0))


def _own(pids: Sequence[int]) -> float:
    seen: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    seen[process.pid] = times.user + times.system
    return sum(seen.values())
