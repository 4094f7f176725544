"""Ctrl-C during cleanup."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

HELD_SECONDS = 5.0


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ignores SIGINT in this context, for the cleanup of a call that already fails.

    A user who presses Ctrl-C twice wants the call to end, not to stop its cleanup. A cleanup that
    takes longer than `HELD_SECONDS` can be interrupted.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted. A handler that is not Python's is None.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    began = time.monotonic()

    def hold(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began > HELD_SECONDS:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
