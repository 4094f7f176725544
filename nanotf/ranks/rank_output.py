"""The output of ranks other than the first: into a log of each, or between rank 0's lines.

Reads NANOTF_WORKER_LOGS, which the supervisor of a job sets: the folder of the logs. Without it
they are in a folder of temporary files, which stays if a rank fails.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence

from nanotf.console import say
from nanotf.machine.processes import OwnedProcess
from nanotf.pool.worker_log import given_folder
from nanotf.wire.log_files import LogFiles


class RankOutput:
    """Writes what ranks other than the first print.

    Args:
        count: number of ranks whose output is not this process's.
        shows_all: True prints their lines, with the rank as prefix, instead of logging them.

    Attributes:
        failed: bool; the caller sets it before `close` if a rank has failed.
    """

    def __init__(self, count: int, shows_all: bool) -> None:
        self.failed = False
        self._logs = LogFiles()  # a full disk must not end the ranks
        self._own: pathlib.Path | None = None  # the folder, if this object has made it
        self._folder: pathlib.Path | None = None
        if count and not shows_all:
            self._folder = given_folder()
            if self._folder is None:
                self._folder = self._own = pathlib.Path(tempfile.mkdtemp(prefix="nanotf-ranks-"))

    def about(self, ranks: Sequence[int]) -> str:
        """Returns the end of a sentence that says where the output goes.

        Args:
            ranks: those of this host.
        """
        if self._folder is None:
            return ""
        if 0 in ranks:
            return f"; rank 0 prints, the others log to {self._folder}"
        return f"; {'they log' if len(ranks) > 1 else 'it logs'} to {self._folder}"

    def write(self, program: OwnedProcess, line: bytes, is_error: bool) -> None:
        """Writes a line of a rank."""
        if self._folder is not None:
            self._logs.write(self._folder / f"rank-{program.name}.log", line)
            return
        stream = sys.stderr if is_error else sys.stdout
        stream.write(f"[{program.name}] {line.decode(errors='replace')}")
        stream.flush()

    def close(self) -> None:
        """Closes the logs. Removes those of temporary files, unless a rank has failed."""
        self._logs.catch_up()  # a disk that was full may have room by now
        self._logs.close()
        if self._own is None:
            return
        if self.failed and any(self._own.iterdir()):  # a log is made with its first line
            say(f"the output of the other ranks is in {self._own}", sys.stderr)
        else:
            shutil.rmtree(self._own, ignore_errors=True)
