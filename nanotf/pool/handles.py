"""The parent's view of its workers: the process, channel and log of each.

`Pool` has a `Crew` of `Worker`s and does not know how they were started: `local` starts them on
this machine, and `hosts.crew` on several hosts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from nanotf.console import logger
from nanotf.errors import WorkerDied, WorkerError, describe_exit
from nanotf.machine import topology
from nanotf.pool import stalls
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire.channel import Channel

DEATH_SECONDS = 2.0  # enough for a process to end after its channel has closed
KILL_SECONDS = 20.0  # a process with tens of gigabytes of memory takes seconds to end
STACK_SIGNAL = signal.SIGQUIT  # makes a worker write its Python stacks to its log
STACK_SECONDS = 5.0  # for a worker to write them
STACK_LOOKS = 4  # a dump is complete when the log has not grown for this many looks

# The consequence of an error that ends a call. Omitted if the workers are restarted at once.
OTHERS_STOPPED = "The other workers were stopped; the next call starts new ones."

_Error = TypeVar("_Error", bound=WorkerError)


class WorkerProcess(Protocol):
    """A worker's process, with the methods of `subprocess.Popen` that a pool needs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


class Worker:
    """The parent's view of one worker.

    Attributes:
        rank: int.
        cores: tuple of int, its logical CPUs.
        process: `WorkerProcess`.
        channel: `Channel`, to the worker or to its proxy.
        log: `WorkerLog`, its output.
        shares_memory: bool, whether it maps this process's shared blocks.
        title: str, what errors call it: "Worker" or "Reader".
    """

    title = "Worker"
    rank: int
    cores: tuple[int, ...]
    process: WorkerProcess
    channel: Channel
    log: WorkerLog
    shares_memory: bool = True

    def log_tail(self) -> str:
        """Returns the last lines that the worker printed; after a crash, the top of its stack."""
        return self.log.tail()

    def is_ready(self) -> None:
        """Records that the worker has started; errors no longer quote its startup output."""
        self.log.begin_here()

    def trim_log(self) -> None:
        """Drops all but the end of a log that has become long."""
        self.log.trim()

    def error(self, kind: type[_Error], message: str, **more: Any) -> _Error:
        """Returns an error that names this worker and quotes the end of its log.

        Args:
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

    def died(self, doing: str) -> WorkerError:
        """Returns the error that reports how the worker ended, a `WorkerDied` by default."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=DEATH_SECONDS)
        how, exit_code, signal = self.how_it_ended()
        what = f"{self.title} {self.rank} ({self.where()}) {how} while {doing}."
        return self.error(
            WorkerDied,
            f"{what} {OTHERS_STOPPED}",
            exit_code=exit_code,
            signal=signal,
            what=what,
        )

    def how_it_ended(self) -> tuple[str, int | None, int | None]:
        """Describes how the worker ended; see `errors.describe_exit`."""
        return describe_exit(self.process.returncode)

    def where(self) -> str:
        """Describes the worker's process and cores for people."""
        return f"pid {self.process.pid}, cores {list(self.cores)}"

    def is_stopped(self) -> bool:
        """Returns True if a signal (SIGSTOP, a debugger) has stopped it."""
        return stalls.is_stopped(self.process.pid)

    def has_answered(self, since: float) -> bool:
        """Returns True if the worker's node has answered since the time `since`."""
        return True

    def stack(self) -> str:
        """Returns the worker's Python stack, which it writes to its log, or why there is none.

        Works even while other code holds the GIL there, but not if the process is stopped. Takes
        up to `STACK_SECONDS`.
        """
        if self.process.poll() is not None:
            return "it has ended"
        if self.is_stopped():
            return "stopped by a signal"
        begin = size = self.log.size()
        self.process.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACK_SECONDS
        quiet = 0
        while time.monotonic() < deadline and (size == begin or quiet < STACK_LOOKS):
            time.sleep(0.05)
            before, size = size, self.log.size()
            quiet = quiet + 1 if size == before else 0
        written = self.log.since(begin)
        return written or "it does not answer"

    def wait_killed(self) -> None:
        """Waits until the killed process has ended, at most `KILL_SECONDS`."""
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:  # stuck in the kernel, as with a hanging file system
            logger.warning(
                "%s %d (%s) was killed, and has not ended for %g s.",
                self.title,
                self.rank,
                self.where(),
                KILL_SECONDS,
            )

    def close(self) -> None:
        """Closes channel and log, after the process has ended."""
        self.channel.close()
        self.log.close()


class Crew(Protocol):
    """The starter of a pool's workers, which also cleans up after they have ended.

    Attributes:
        workers: list of the `Worker`s started so far, by rank.
        here: the plan of the workers that share this process's memory.
        hosts: `HostsSpec` if the workers' group spans hosts, else None.
        deadline: float, limit in seconds of one wait in this host's group.
    """

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def here(self) -> topology.Plan: ...

    @property
    def hosts(self) -> Any: ...

    @property
    def deadline(self) -> float: ...

    def start(self) -> None:
        """Starts the workers."""

    def take_connections(self, rank: int) -> list[int]:
        """Returns descriptors of the connections between hosts that a worker's setup needs.

        The caller sends and closes them.
        """

    def close(self) -> None:
        """Releases the resources used to start the workers, after they have ended."""


def stacks(workers: Sequence[Worker]) -> list[str]:
    """Returns the Python stacks of several workers, all taken at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(workers), "nanotf-stack") as pool:
        return list(pool.map(lambda worker: worker.stack(), workers))
