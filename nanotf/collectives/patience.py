"""The time left for a wait, as `Patience` of `native/call.cc` has it."""

from __future__ import annotations

import time


class Patience:
    """The time left for a wait.

    A late look counts as only one second: this process was frozen meanwhile (SIGSTOP,
    `docker pause`), and usually its peers too, so that they could not arrive.

    Args:
        seconds: float, the time that the wait may take.
    """

    def __init__(self, seconds: float) -> None:
        self._looked, self._left = time.monotonic(), seconds

    def is_over(self) -> bool:
        """Looks at the clock. Call it at least once each second."""
        now = time.monotonic()
        self._looked, self._left = now, self._left - min(now - self._looked, 1.0)
        return self._left < 0
