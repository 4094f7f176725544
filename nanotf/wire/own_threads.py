"""Threads of nanotf, apart from a user's."""

from __future__ import annotations

import threading


class OwnThread(threading.Thread):
    """A thread that nanotf starts in the user's process: what it does is no doing of the user's."""

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended; at most `timeout` seconds. One that never began has ended."""
        if self.is_alive():
            super().join(timeout)
