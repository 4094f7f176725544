"""The parent's view of one worker: its process, its channel, its log."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any, TypeVar

from nanotf import environment, topology
from nanotf.channel import Channel
from nanotf.errors import WorkerDied, WorkerError, describe_exit

LOG_TAIL_LINES = 20
DEATH_SECONDS = 2.0  # a process that has closed its channel is gone by then

logger = logging.getLogger("nanotf")

_Error = TypeVar("_Error", bound=WorkerError)


class WorkerProcess:
    """The parent's view of one worker.

    Args:
        placement: `topology.Placement`, its rank and cores.
        key: bytes, the pool's secret key.
    """

    def __init__(self, placement: topology.Placement, key: bytes) -> None:
        self.rank = placement.rank
        self.cores = placement.cores
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "nanotf.worker", str(theirs.fileno()), str(self.rank)]
        pinned = placement.cores if placement.pin else ()
        command.append(",".join(map(str, pinned)))
        command.append("" if placement.numa_node is None else str(placement.numa_node))
        try:
            # A session of its own: Ctrl-C in the terminal is for the parent to handle.
            self.process = subprocess.Popen(
                command,
                env=_variables(placement),
                stdin=subprocess.PIPE,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.channel = Channel(ours)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died already; the channel will tell
            self.process.stdin.write(key)
            self.process.stdin.close()

    def log_tail(self) -> str:
        """The last lines that the worker printed."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 65536))
        lines = self.log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def error(self, kind: type[_Error], message: str, **more: Any) -> _Error:
        """An error that says which worker it is about, with the end of its log.

        Args:
            kind: `WorkerError` or a subclass.
            message: str.
            **more: further arguments of `kind`.
        """
        return kind(
            message,
            rank=self.rank,
            pid=self.process.pid,
            cores=self.cores,
            log_tail=self.log_tail(),
            **more,
        )

    def died(self, doing: str) -> WorkerDied:
        """The error that says how the worker ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=DEATH_SECONDS)
        how, exit_code, signal = describe_exit(self.process.returncode)
        return self.error(
            WorkerDied,
            f"Worker {self.rank} (pid {self.process.pid}, cores {list(self.cores)}) {how} "
            f"while {doing}. The other workers were stopped; the next call starts new ones.",
            exit_code=exit_code,
            signal=signal,
        )


def _variables(placement: topology.Placement) -> dict[str, str]:
    """The whole environment of a worker."""
    found = environment.worker_environment(placement, os.environ)
    if placement.rank == 0:  # the same for all
        for warning in found.warnings:
            logger.warning("%s", warning)
        for name, value in found.kept.items():
            logger.info("Workers keep %s=%s, which you have set.", name, value)
    variables = found.apply(os.environ)
    variables["NANOTF_RANK"] = str(placement.rank)
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    paths = [p for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root not in paths:
        variables["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return variables
