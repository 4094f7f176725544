"""The duties of every supervisor: it detaches, owns the state, reacts to SIGTERM.

It forks, and leaves the session of the terminal, so it outlives the terminal. If it is killed, the
kernel kills its programs (PR_SET_PDEATHSIG), and readers see that the owner has ended.

A full disk does not end it: it holds its state and its logs, and writes them when there is room.
Where the disk refuses the final state for another reason, such as a file system that has become
read-only, it ends after ten minutes, and the system's log says how.
"""

from __future__ import annotations

import abc
import os
import pathlib
import signal
import sys
import syslog
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from nanotf.console import say
from nanotf.sagemaker.detached.folders import AnyState, DetachedFolder
from nanotf.sagemaker.detached.owner import Owner
from nanotf.wire import files
from nanotf.wire.log_files import LogFiles, SpokenLog

_PAUSE = 1.0  # seconds between two tries to write on a full disk
_START_SECONDS = 60.0  # for room for the first state, while the launching process waits
_ROOM_SECONDS = 600.0  # for room for results; what does not fit has to be told some time
_LOG_SECONDS = 60.0  # for room for the log, if there is enough for the final state
_END_SECONDS = 600.0  # for a disk that is not full to take the final state

_Result = TypeVar("_Result")


class DetachedSupervisor(abc.ABC, Generic[AnyState]):
    """The owner of a folder, once it has taken over.

    Args:
        folder: the folder, whose state the launching process has written.
        log_limit: as `limit` of `LogFiles`.
    """

    def __init__(self, folder: DetachedFolder[Any, AnyState], log_limit: int | None = None) -> None:
        self._folder = folder
        self._state: AnyState = folder.read_state()
        self._is_written = True  # False while the disk has an older state
        self._refusal: OSError | None = None  # why the disk did not take the last state; said once
        self._log_until = 0.0  # the moment until which a final state waits for the log
        self._logs = LogFiles(log_limit)
        self.spoken = SpokenLog()

    @abc.abstractmethod
    def run(self) -> None:
        """Does what the request asks for. The final state is written in any case."""

    @abc.abstractmethod
    def _on_signal(self, *_: object) -> None:
        """Handles SIGTERM, in the main thread."""

    def take_over(self) -> None:
        """Becomes the owner.

        Raises:
            NanoError: The launching process has given up. The error is of the kind's class.
            OSError: The disk takes no state.
        """
        # Not `_with_room`, which notes in the state that it waits: that is not this process's yet.
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._write_owner()
                return
            except OSError as error:
                if error.errno not in files.FULL or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE)

    def _write_owner(self) -> None:
        state = self._folder.read_state()  # the launching process may have given up meanwhile
        if state.is_final:
            kind = self._folder.kind
            raise kind.error(
                f"A supervisor takes over {kind.a_noun} that has not ended. Received: "
                f"{self._folder.path}, whose status is {state.status}."
            )
        state = replace(state, owner=Owner.this_process(is_supervisor=True))
        self._folder.write_state(state)
        self._state = state

    def handle_signals(self) -> None:
        """Installs the signal handlers: SIGTERM stops what it owns."""
        signal.signal(signal.SIGTERM, self._on_signal)
        # Not SIG_IGN, which programs would inherit. The launching process may ignore SIGCHLD, and
        # then exit codes would be lost; with a handler, a program's end ends `Output.read`.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    # ------------------------------------------------------------------------ the record
    def _become(self, **changes: Any) -> None:
        """Changes the state. It is written now, or by `_catch_up`."""
        self._set(replace(self._state, **changes))

    def _set(self, state: AnyState) -> None:
        self._state, self._is_written = state, False
        self._catch_up()

    def _catch_up(self) -> bool:
        """Writes what the disk has not taken. Subclasses call it at each turn.

        Returns:
            True if everything is written.
        """
        held = self.spoken.catch_up() or self._logs.catch_up()
        if not self._is_written and not self._waits_for_log(held):
            self._write_state()
        return self._is_written and held is None

    def _waits_for_log(self, held: OSError | None) -> bool:
        """Returns True if a final state must wait: whoever reads that finds the log whole."""
        if held is None or not self._state.is_final:
            return False
        return held.errno in files.FULL and time.monotonic() < self._log_until

    def _write_state(self) -> None:
        try:
            self._folder.write_state(self._state)
            self._is_written, self._refusal = True, None
        except OSError as error:
            if self._refusal is None:
                self._say_full("state", error)
            self._refusal = error

    def _end(self, state: AnyState) -> None:
        """Writes the final state. Waits until the disk takes it; if it is not full, ten minutes."""
        began = time.monotonic()
        self._log_until = began + _LOG_SECONDS
        self._set(state)
        while not self._is_written and not self._is_deleted():
            is_full = self._refusal is None or self._refusal.errno in files.FULL
            if not is_full and time.monotonic() > began + _END_SECONDS:
                self._tell_system()
                return
            time.sleep(_PAUSE)
            self._catch_up()

    def _is_deleted(self) -> bool:
        try:
            self._folder.path.stat()
        except files.GONE:
            return True
        except OSError:  # its disk is gone, and may come back
            return False
        return False

    def _tell_system(self) -> None:
        """Says how it has ended where the disk does not matter, and in its log, if that can be."""
        text = (
            f"the {self._folder.kind.noun} {self._folder.path.name} ended with status "
            f"{self._state.status}, but {self._folder.path} does not take its state "
            f"({self._refusal}): {self._state}"
        )
        say(text, sys.stderr)
        syslog.openlog("nanotf")
        syslog.syslog(syslog.LOG_ERR, text)

    def _with_room(self, what: str, action: Callable[[], _Result]) -> _Result:
        """Does what needs room on the disk; on a full one again, until it succeeds.

        Args:
            what: names it, for messages.
            action: may be called after it has failed.

        Returns:
            What the action returns.

        Raises:
            OSError: The disk is full for good, or another one of the action.
        """
        deadline = None
        while True:
            try:
                result = action()
                if deadline is not None:
                    self._note_waiting(None)
                return result
            except OSError as error:
                moment = time.monotonic()
                if error.errno not in files.FULL or (deadline is not None and moment > deadline):
                    raise
                if deadline is None:
                    deadline = moment + _ROOM_SECONDS
                    self._note_waiting(self._say_full(what, error))
            self._catch_up()
            time.sleep(_PAUSE)

    def _note_waiting(self, text: str | None) -> None:
        """Records what waits for room on the disk; None when nothing does any more."""

    def _say_full(self, what: str, error: OSError) -> str:
        text = f"the {what} of the {self._folder.kind.noun} cannot be written now: {error}"
        say(text, sys.stderr)
        return text


def detach(
    arguments: Sequence[str], make: Callable[[pathlib.Path], DetachedSupervisor[Any]]
) -> int:
    """Detaches a supervisor. Returns 0 once it owns the folder.

    Args:
        arguments: the folder.
        make: makes the supervisor of a folder.
    """
    (folder,) = arguments
    read_end, write_end = os.pipe()
    if os.fork() != 0:
        os.close(write_end)
        owns = os.read(read_end, 1)  # empty if the supervisor ended before
        return 0 if owns else 1
    os.setsid()
    spoken = SpokenLog()
    spoken.install()
    code = 1
    try:
        os.close(read_end)
        supervisor = make(pathlib.Path(folder))
        supervisor.spoken = spoken
        supervisor.handle_signals()
        supervisor.take_over()
        os.write(write_end, b"1")
        os.close(write_end)
        supervisor.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    spoken.catch_up()
    # Threads of an upload that was stopped would keep an ordinary end waiting.
    os._exit(code)
