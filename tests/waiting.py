"""Waits for a condition instead of a fixed time; stops a process."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest

SECONDS = 60.0  # long enough even on a busy machine


def wait_until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Waits for a condition; fails with `what` if it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)


def freeze(pid: int) -> None:
    """Stops a process by SIGSTOP, and waits until no thread of it runs: busy ones stop later."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states_of_threads(pid) == {"T"}, f"process {pid} stops")


def _states_of_threads(pid: int) -> set[str]:
    """Returns the letters of proc(5); none if a thread has just ended."""
    try:
        files = [file.read_text() for file in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return set()
    return {text.rpartition(")")[2].split()[0] for text in files}
