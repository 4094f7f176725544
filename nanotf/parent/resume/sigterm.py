"""SIGTERM during `fit(resume=...)`: a checkpoint first, then what the signal does by itself.

Schedulers (Slurm, Kubernetes, spot machines) announce the end of a job by this signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Sigterm:
    """A context in which SIGTERM is noted, and delivered when a checkpoint has been written.

    Python runs signal handlers in the main thread alone. A `fit` in another thread leaves the
    signal as it is, and so does a program that ignores it.

    Attributes:
        heard: bool, whether the signal came and was not delivered yet.
        holds: bool, whether there is something to write first.
        wake: callable that makes this process look at `heard` soon.
    """

    def __init__(self) -> None:
        self.heard = self.holds = False
        self.wake: Callable[[], None] = lambda: None
        self._before: Any = None  # the user's handler, or an action such as `SIG_DFL`
        self._is_installed = False
        self._frame: FrameType | None = None  # for the user's handler

    def __enter__(self) -> Sigterm:
        self._before = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        # None is a handler that is not Python's.
        if is_main and self._before not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, self._hear)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._before)
            self._is_installed = False
        if self.heard:  # `fit` raised before it could write
            self.deliver()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard, self._frame = True, frame
        if self.holds:
            self.wake()
        else:
            self.deliver()

    def deliver(self) -> None:
        """Does what the signal would have done: ends the process, or calls the user's handler."""
        self.heard = False
        if callable(self._before):
            self._before(signal.SIGTERM, self._frame)
            return
        # The signal's default action ends the process at once, and flushes nothing.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as in a daemon
                with contextlib.suppress(Exception):  # its reader may have got the signal first
                    stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
