"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

SECONDS = 60.0  # what ends or begins by itself has done so by then, on a busy machine too


def wait_until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Waits for a condition; fails with `what` when it has not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)
