"""A process that dies while it starts is started again, after a pause."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from nanotf.console import logger
from nanotf.errors import WorkerDied, WorkerError

START_TRIES = 3
PAUSE_SECONDS = 0.5  # before the second try; then twice as long

_Started = TypeVar("_Started")


class SetupError(WorkerError):
    """A worker could not set up its strategy. `retry` is True if starting again may help."""

    retry = False


def started(start: Callable[[], _Started], ending: Callable[[], bool] = lambda: False) -> _Started:
    """Returns what `start` returns; calls it again if a process dies, as what ended it may pass.

    Args:
        ending: returns True if nobody wants the process any more.

    Raises:
        WorkerDied, SetupError: The last try's.
    """
    for attempt in itertools.count():
        try:
            return start()
        except (SetupError, WorkerDied) as error:
            retry = not isinstance(error, SetupError) or error.retry
            if ending() or not retry or attempt == START_TRIES - 1:
                raise
            tries = attempt + 2
            logger.warning("%s It is started again: try %d of %d.", error.what, tries, START_TRIES)
        time.sleep(PAUSE_SECONDS * 2**attempt)
    raise AssertionError("unreachable")
