"""Starts of workers: announced if they take seconds, and tried again if a process dies.

The import of TensorFlow takes seconds; a fork of a process that has imported it does not. So what
imports it calls `takes_seconds`, in the middle of the start that `announced` has begun, which
then shows a line. The time is that of the last such start on this machine, which
`nanotf/starts.json` in the user's cache directory keeps.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from nanotf.console import logger, status
from nanotf.errors import WorkerDied, WorkerError
from nanotf.machine import user_cache
from nanotf.wire import files

TENSORFLOW = "TensorFlow"  # a reason why a start takes seconds: the workers' process imports it
START_TRIES = 3
PAUSE_SECONDS = 0.5  # before the second try; then twice as long

NEWS = 0.2  # a time that differs from the noted one by more than this part of it is noted
KEPT = 20  # times in the file
_LONGEST = 1e6  # seconds; more is no time, and neither is NaN

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


class _Start:
    """A start of workers.

    Args:
        what: the workers, for people.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._key = ""  # of its time in the file; "" if it takes no seconds
        self._shown = contextlib.ExitStack()

    def takes_seconds(self, why: str) -> None:
        if self._key:
            return
        self._key = _key_of(why)
        known = last_seconds(why)
        about = "some seconds" if known is None else f"about {max(1, round(known))} s"
        self._shown.enter_context(status(f"starting {self._what}, {about}, once"))

    def end(self) -> None:
        self._shown.close()

    def note(self) -> None:
        """Notes how long it has taken."""
        if self._key:
            _note(self._key, time.monotonic() - self._began)


_now: contextvars.ContextVar[_Start | None] = contextvars.ContextVar("start", default=None)


@contextlib.contextmanager
def announced(count: int, kind: str) -> Iterator[None]:
    """Tells the user in this context, in which workers start, if that takes seconds.

    Args:
        count: the number of workers.
        kind: the word for one of them.
    """
    start = _Start(f"{count} {kind}{'s' if count > 1 else ''}")
    token = _now.set(start)
    try:
        yield
    finally:
        _now.reset(token)
        start.end()
    start.note()


def takes_seconds(why: str) -> None:
    """Tells the user that the workers of this context take seconds to start.

    Args:
        why: a word by which the time is noted.
    """
    if (start := _now.get()) is not None:
        start.takes_seconds(why)


def last_seconds(why: str) -> float | None:
    """Returns the seconds of the last start that was noted under a word; None if none was.

    Args:
        why: as in `takes_seconds`.
    """
    return _times().get(_key_of(why))


def _key_of(why: str) -> str:
    return f"{why} {sys.prefix}"


def _times() -> dict[str, float]:
    """Returns the noted times in seconds, by key."""
    try:
        path = user_cache.folder() / "starts.json"
        with files.doubting(path):
            found = {str(key): float(seconds) for key, seconds in files.read_json(path).items()}
            return {key: seconds for key, seconds in found.items() if 0 < seconds < _LONGEST}
    except (OSError, files.Damaged, user_cache.NoHomeError):  # then nobody knows the time
        return {}


def _note(key: str, seconds: float) -> None:
    times = _times()
    if abs(times.pop(key, 0.0) - seconds) <= NEWS * seconds:
        return
    latest = {key: round(seconds, 1), **dict(list(times.items())[: KEPT - 1])}
    # A time for people is worth no warning.
    with contextlib.suppress(OSError, user_cache.NoHomeError):
        path = user_cache.folder() / "starts.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, latest)
