"""Waits for a condition instead of a fixed time."""

from __future__ import annotations

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
