"""The process that owns a folder: first the launching one, then the supervisor.

Nobody else writes the state, so an owner that was killed leaves an unfinished one behind. Readers
therefore look whether the owner still lives: by its pid and its start time, since pids are used
again.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanotf.errors import UnavailableError
from nanotf.machine import process_identity
from nanotf.wire import files


def must(is_right: bool, what: str) -> None:
    """Raises `Damaged` for a part of a record that nanotf cannot have written."""
    if not is_right:
        raise files.Damaged(f"a record has a wrong value: {what}")


@dataclass(frozen=True)
class Owner:
    """The process that owns a folder."""

    pid: int
    start: str  # tells the process from later ones with the same pid
    node: str  # the machine's name
    is_supervisor: bool = False  # False for a launching process

    @classmethod
    def this_process(cls, *, is_supervisor: bool = False) -> Owner:
        """Returns this process.

        Raises:
            UnavailableError: The system does not tell when a process has started.
        """
        start = process_identity.start_of(os.getpid())
        if start is None:
            raise UnavailableError(
                "Jobs and endpoints are told by the start of their processes. Received: a system "
                "without /proc/PID/stat. Mount a whole /proc."
            )
        return cls(os.getpid(), start, platform.node(), is_supervisor)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Owner:
        """Reads what `dataclasses.asdict` has written."""
        owner = cls(**value)
        # `os.kill` takes 0 and numbers below for groups of processes. True is an int.
        must(type(owner.pid) is int and 0 < owner.pid < 1 << 31, "owner")
        must(isinstance(owner.start, str) and isinstance(owner.node, str), "owner")
        return owner

    @property
    def is_here(self) -> bool:
        """True if the process runs, or ran, on this machine."""
        return self.node == platform.node()  # machines may share the folder's disk, but not pids

    def is_alive(self) -> bool:
        """Returns False if the process has ended. True on another machine, where none can tell."""
        return not self.is_here or process_identity.start_of(self.pid) == self.start
