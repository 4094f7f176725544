"""Reads and steers what a supervisor owns, from any process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, TextIO

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.pool import stalls
from nanotf.sagemaker.detached.folders import (
    AnyState,
    DetachedFolder,
    DetachedState,
    may_pass,
)

_PAUSE = 0.2  # seconds between two looks
_STOP_SECONDS = 30.0  # until a supervisor reacts to a signal, on a busy machine


def wait(
    folder: DetachedFolder[Any, AnyState],
    log: Callable[[str], object] | None,
    read: Callable[[], str],
    *,
    until: Callable[[AnyState], bool] = lambda state: state.is_final,
    pause: float = _PAUSE,
) -> AnyState:
    """Waits for a state.

    Args:
        log: receives the log as it grows; None prints nothing.
        read: returns the part of the log that is new.
        until: whether to end at a state.
        pause: seconds between two looks.

    Returns:
        The state.
    """
    told, is_refused, notice = False, False, None
    state: AnyState | None = None
    while True:
        try:
            state = folder.read_state()  # before the log: a final one means that the log is whole
            text = "" if log is None else read()
        except (NanoError, OSError) as error:
            if state is None or not may_pass(error):
                raise
            if not is_refused:
                logger.warning("%s This process waits for that.", error)
            is_refused = True
            time.sleep(pause)
            continue
        is_refused = False
        if log is not None and text:
            log(text)
        if until(state):
            return state
        before, notice = notice, folder.notice_of(state)
        if notice not in (None, before):
            logger.warning("%s", notice)
        if not told and state.owner.is_here and stalls.is_stopped(state.owner.pid):
            told = True
            logger.warning("%s", _of_stopped(folder, state))
        time.sleep(pause)


def _of_stopped(folder: DetachedFolder[Any, Any], state: DetachedState) -> str:
    noun, pid = folder.kind.noun, state.owner.pid
    return (
        f"A signal (SIGSTOP) has stopped process {pid}, the supervisor of {folder.name}: nothing "
        f"of the {noun} is recorded until it continues (`kill -CONT {pid}`)."
    )


def print_to(file: TextIO) -> Callable[[str], object]:
    """Returns a function that prints text at once."""

    def write(text: str) -> None:
        file.write(text)
        file.flush()

    return write


def stop(folder: DetachedFolder[Any, AnyState]) -> AnyState:
    """Asks a supervisor to stop what it owns, by SIGTERM.

    Returns:
        The state after the supervisor has begun to stop it.

    Raises:
        InvalidArgumentError: It has ended, or is being stopped already.
        NanoError: The supervisor is on another machine, or does not react. The error is of the
            kind's class.
    """
    kind, state = folder.kind, _supervised(folder)
    if not folder.may_stop(state):
        raise InvalidArgumentError(
            f"Only {kind.a_noun} in progress can be stopped. Received: {folder.name}, whose status "
            f"is {state.status}."
        )
    if not state.owner.is_here:
        raise kind.error(
            f"{kind.a_noun.capitalize()} is stopped on the machine that runs it. Received: "
            f"{folder.name}, which runs on {state.owner.node}. Call `nanotf {kind.default} stop "
            f"{folder.name}` there."
        )
    # It may end at this moment; its last state is then the answer.
    try:
        os.kill(state.owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        return folder.read_state()
    before, deadline = state, time.monotonic() + _STOP_SECONDS
    # A second stop, of an upload, finds a status that is not running: a change answers it.
    while (state := folder.read_state()).status in kind.running or state == before:
        if time.monotonic() > deadline:
            if stalls.is_stopped(state.owner.pid):
                raise kind.error(_of_stopped(folder, state))
            raise kind.error(
                f"The supervisor of {kind.a_noun} must react to SIGTERM in {_STOP_SECONDS:.0f} s. "
                f"Received: no reaction of process {state.owner.pid}, {kind.noun} {folder.name}. "
                "On a full disk it cannot record the stop: make room. Otherwise kill it: the "
                "kernel then ends its programs."
            )
        time.sleep(_PAUSE)
    return state


def _supervised(folder: DetachedFolder[Any, AnyState]) -> AnyState:
    """Returns the state once there is a supervisor; the launching process must not be stopped.

    Raises:
        NanoError: The launching process does not hand the folder over.
    """
    kind, deadline = folder.kind, time.monotonic() + _STOP_SECONDS
    while not (state := folder.read_state()).is_final and not state.owner.is_supervisor:
        if time.monotonic() > deadline:
            raise kind.error(
                f"{kind.a_noun.capitalize()} is stopped after it has begun. Received: "
                f"{folder.name}, which process {state.owner.pid} still prepares. Try again, or end "
                "that process."
            )
        time.sleep(_PAUSE)
    return state
