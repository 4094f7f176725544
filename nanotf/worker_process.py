"""The parent's view of one worker: its process, its channel, its log."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanotf import environment, stalls, topology
from nanotf.channel import Channel
from nanotf.errors import WorkerDied, WorkerError, describe_exit
from nanotf.worker_log import WorkerLog

DEATH_SECONDS = 2.0  # a process that has closed its channel is gone by then
STACK_SIGNAL = signal.SIGQUIT  # makes a worker write its Python stacks to its log
STACK_SECONDS = 1.0

logger = logging.getLogger("nanotf")

_Error = TypeVar("_Error", bound=WorkerError)


class WorkerProcess:
    """The parent's view of one worker.

    Args:
        placement: `topology.Placement`, its rank and cores.
        key: bytes, the pool's secret key.
        transport: str, one of `transports.TRANSPORTS`.
    """

    def __init__(self, placement: topology.Placement, key: bytes, transport: str) -> None:
        self.rank = placement.rank
        self.cores = placement.cores
        self.log = WorkerLog()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "nanotf.worker", str(theirs.fileno()), str(self.rank)]
        pinned = placement.cores if placement.pin else ()
        command.append(",".join(map(str, pinned)))
        command.append("" if placement.numa_node is None else str(placement.numa_node))
        command += [transport, str(os.getpid())]
        try:
            # A session of its own: Ctrl-C in the terminal is for the parent to handle.
            self.process: subprocess.Popen[bytes] = _in_lasting_thread(
                lambda: subprocess.Popen(
                    command,
                    env=_variables(placement),
                    stdin=subprocess.PIPE,
                    stdout=self.log.fileno(),
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )
        except BaseException:
            ours.close()
            self.log.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died already; the channel will tell
            self.process.stdin.write(key)
            self.process.stdin.close()

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
            log_tail=self.log.tail(),
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


def stacks(workers: Sequence[WorkerProcess]) -> list[str]:
    """The Python stacks of workers, as each writes them to its log.

    Whatever holds Python's lock there does not keep it from doing so; a stopped process does not.
    """
    begins = [worker.log.size() for worker in workers]
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(STACK_SIGNAL)

    def sizes() -> list[int]:
        return [worker.log.size() for worker in workers]

    deadline = time.monotonic() + STACK_SECONDS
    before, now = begins, sizes()
    # Until all have written, and have written no more for a moment.
    while time.monotonic() < deadline and (now != before or any(map(int.__eq__, now, begins))):
        time.sleep(0.05)
        before, now = now, sizes()
    return [
        worker.log.since(begin) or _why_no_stack(worker)
        for worker, begin in zip(workers, begins, strict=True)
    ]


def _why_no_stack(worker: WorkerProcess) -> str:
    if worker.process.poll() is not None:
        return "it has ended"
    return "stopped by a signal" if stalls.is_stopped(worker.process.pid) else "it does not answer"


# ------------------------------------------------------------------------ a lasting thread
# Linux ends a worker with the *thread* that started it (PR_SET_PDEATHSIG), while a pool outlives
# the thread that happened to need it first. So one thread, which never ends, starts them all.
_tasks: queue.SimpleQueue[Callable[[], None]] | None = None
_tasks_owner = 0  # the process that the thread belongs to; a forked one needs a thread of its own
_tasks_lock = threading.Lock()


def _in_lasting_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises when the lasting thread of this process calls it."""
    global _tasks, _tasks_owner
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def task() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    with _tasks_lock:
        if _tasks is None or _tasks_owner != os.getpid():
            _tasks, _tasks_owner = queue.SimpleQueue(), os.getpid()
            threading.Thread(
                target=_run_tasks, args=(_tasks,), name="nanotf-starter", daemon=True
            ).start()
        _tasks.put(task)
    result, error = outcome.get()
    if error is not None:
        raise error
    return result


def _run_tasks(tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()


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
