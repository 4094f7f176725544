"""Ctrl-C while a call ends.

The first Ctrl-C ends a call: its workers are killed, and the user's model gets the state of its
last epoch. Then this process waits until the workers are gone, which takes seconds on a busy
machine. After a second Ctrl-C it waits no longer: a thread frees what the call has used, or the
kernel does, if this process ends first.

Only the main thread gets interrupts, and only it writes this module's variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from nanotf.console import say

MOMENT_SECONDS = 1.0  # of waiting, after which a line says so
POLL_SECONDS = 0.05  # between looks for a second Ctrl-C


@dataclasses.dataclass
class _Cleanup:
    """The outermost `held_back`, if there is one."""

    holds: bool = False  # whether there is one
    presses: int = 0  # of Ctrl-C, including the one that ends the call
    told: bool = False  # whether it has printed its line


_now = _Cleanup()


@contextlib.contextmanager
def held_back(error: BaseException | None = None, most: int = 2) -> Iterator[None]:
    """Holds Ctrl-C back in this context, for the cleanup of a call that already fails.

    The first does not interrupt the cleanup; the second ends its waits (`wait_for`), any further
    one interrupts it. If something else has ended the call, `KeyboardInterrupt` follows the
    context.

    Args:
        error: what has ended the call, if an exception has.
        most: how many do not interrupt at once, with the one that has ended the call.
    """
    begun = isinstance(error, KeyboardInterrupt)
    before = _interrupting_handler()
    if before is None or _now.holds:
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        _now.presses += 1
        if _now.presses > most:
            before(number, frame)

    raised: BaseException | None = None
    try:
        _now.holds, _now.presses, _now.told = True, int(begun), False
        signal.signal(signal.SIGINT, hold)
        yield
    except BaseException as failure:
        raised = failure
        raise
    finally:
        _now.holds = False
        signal.signal(signal.SIGINT, before)
        # Also in place of an error: a program that a terminal interrupts, too, fails by it.
        if _now.presses > 0 and not begun and not isinstance(raised, KeyboardInterrupt):
            before(signal.SIGINT, None)


def deferred() -> contextlib.AbstractContextManager[None]:
    """Lets the first Ctrl-C interrupt after a context; the second interrupts at once.

    For code of Keras that an exception would leave half done for good, or that swallows
    `KeyboardInterrupt` by a bare `except:`.
    """
    return held_back(most=1)


def _interrupting_handler() -> Any:
    """Returns Python's handler of SIGINT; None if there is none, or not in this thread."""
    found = signal.getsignal(signal.SIGINT)
    return found if _is_main_thread() and callable(found) else None


def finish(work: Callable[[], None], name: str) -> bool:
    """Calls a function that waits; leaves it to a thread of its own after a second Ctrl-C.

    Args:
        name: the thread's.

    Returns:
        True if it has ended.

    Raises:
        BaseException: What it raised.
    """
    if not _is_main_thread() or not _now.holds:
        work()
        return True
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system allows none, or Python 3.12 at the end of the process
        work()
        return True
    has_ended = wait_for(thread, math.inf)
    if has_ended and raised:
        raise raised[0]
    return has_ended


def wait_for(thread: threading.Thread, seconds: float) -> bool:
    """Waits until a thread has ended, in a cleanup that `held_back` protects.

    Args:
        thread: a daemon: this process does not wait for it at its end.
        seconds: limit.

    Returns:
        True if it has ended. False if the time has passed, or after a second Ctrl-C.
    """
    if not _is_main_thread() or not _now.holds:
        thread.join(seconds)
        return not thread.is_alive()
    began = time.monotonic()
    while thread.is_alive() and (waited := time.monotonic() - began) < seconds:
        if _now.presses > 1:
            if not _now.told:
                say("the call ends at once. Its workers were killed.", sys.stderr)
            _now.told = True
            return False
        if waited > MOMENT_SECONDS and _now.presses and not _now.told:
            _now.told = True
            say("ending the call. Ctrl-C again ends it at once.", sys.stderr)
        thread.join(min(POLL_SECONDS, seconds - waited))
    return not thread.is_alive()


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
