"""Ctrl-C while something is being put in order."""

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
    """Ignores SIGINT in this context: for the end of a call that fails already.

    Who presses Ctrl-C twice wants the call to end, not to lose what it leaves in order. What takes
    longer than `HELD_SECONDS` can be interrupted.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    # Other threads are not interrupted. None: a handler that is not Python's.
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
