"""The duties of every supervisor: it detaches, owns the state, reacts to SIGTERM.

It forks, and leaves the session of the terminal, so it outlives the terminal. If it is killed, the
kernel kills its programs (PR_SET_PDEATHSIG), and readers see that the owner has ended.
"""

from __future__ import annotations

import abc
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

from nanotf.console import say
from nanotf.sagemaker.detached.folders import AnyState, DetachedFolder
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.detached.starting import FULL
from nanotf.worker.process import write_log

_PAUSE = 1.0  # seconds between two tries to write the final state


class DetachedSupervisor(abc.ABC, Generic[AnyState]):
    """The owner of a folder, once it has taken over.

    Args:
        folder: the folder, whose state the launching process has written.
    """

    def __init__(self, folder: DetachedFolder[Any, AnyState]) -> None:
        self._folder = folder
        self._state: AnyState = folder.read_state()
        self._is_written = True  # False while the disk is full: it then has an older state

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
            OSError: The disk is full.
        """
        if self._state.is_final:
            kind = self._folder.kind
            raise kind.error(
                f"A supervisor takes over {kind.a_noun} that has not ended. Received: "
                f"{self._folder.path}, whose status is {self._state.status}."
            )
        owner = Owner.this_process(is_supervisor=True)
        self._state = replace(self._state, owner=owner)
        self._folder.write_state(self._state)

    def handle_signals(self) -> None:
        """Installs the signal handlers: SIGTERM stops what it owns."""
        signal.signal(signal.SIGTERM, self._on_signal)
        # Not SIG_IGN, which programs would inherit. The launching process may ignore SIGCHLD, and
        # then exit codes would be lost.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _become(self, **changes: Any) -> None:
        """Changes the state. A full disk keeps the old one until `_catch_up` finds room."""
        self._state = replace(self._state, **changes)
        was_written, self._is_written = self._is_written, False
        self._catch_up(tells=was_written)

    def _catch_up(self, *, tells: bool = False) -> None:
        """Writes a state that a full disk did not take. Subclasses call it at each turn.

        Args:
            tells: whether to print a line if the disk is still full.
        """
        if self._is_written:
            return
        try:
            self._folder.write_state(self._state)
            self._is_written = True
        except OSError as error:
            if error.errno not in FULL:
                raise
            if tells:
                self._say_full("state", error)

    def _end(self, state: AnyState) -> None:
        """Writes the final state. Waits for room on a full disk."""
        self._state, is_told = state, False
        while True:
            try:
                self._folder.write_state(self._state)
                self._is_written = True
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not is_told:
                    self._say_full("final state", error)
                is_told = True
                time.sleep(_PAUSE)

    def _say_full(self, what: str, error: OSError) -> None:
        noun = self._folder.kind.noun
        say(f"the {what} of the {noun} cannot be written now: {error}", sys.stderr)


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
    write_log()  # what it says may not end it, though the disk is full
    try:
        os.close(read_end)
        supervisor = make(pathlib.Path(folder))
        supervisor.handle_signals()
        supervisor.take_over()
        os.write(write_end, b"1")
        os.close(write_end)
        supervisor.run()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
