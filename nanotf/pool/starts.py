"""A process that dies while it starts is started again, after a pause."""

from __future__ import annotations

import time

from nanotf.console import logger
from nanotf.errors import WorkerError

START_TRIES = 3
PAUSE_SECONDS = 0.5  # before the second try; then twice as long each time, up to
LONGEST_PAUSE = 8.0  # only readers get there: they may be started more often


def pause(tries: int, error: WorkerError) -> None:
    """Says that a process is started again, and waits: what ended it may pass.

    Args:
        tries: how often it has been started again already.
        error: why it has not started.
    """
    logger.warning("%s It is started again: try %d of %d.", error.what, tries + 2, START_TRIES)
    time.sleep(PAUSE_SECONDS * 2**tries)
