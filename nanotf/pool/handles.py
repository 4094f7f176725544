"""The parent's view of its workers: of each, process, channel and log.

`Pool` knows a `Crew` of `Worker`s, and not how they were started: `local` starts them here,
`ray.crew` through Ray.
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
from nanotf.pool import stalls
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire.channel import Channel

DEATH_SECONDS = 2.0  # a process that has closed its channel is gone by then
KILL_SECONDS = 20.0  # one that holds tens of gigabytes takes seconds to end
STACK_SIGNAL = signal.SIGQUIT  # makes a worker write its Python stacks to its log
STACK_SECONDS = 5.0
STACK_LOOKS = 4  # a dump is complete when the log has not grown for so many looks

# What comes of an error that ends a call; not said where workers are started again at once.
OTHERS_STOPPED = "The other workers were stopped; the next call starts new ones."

_Error = TypeVar("_Error", bound=WorkerError)


class Process(Protocol):
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
        cores: tuple of int, the logical CPUs that it has.
        process: `Process`.
        channel: `Channel`, to the worker or to its proxy.
        log: `WorkerLog`, what it prints.
        host: str, where another worker reaches it.
        shares_memory: bool, whether it maps this process's shared blocks.
    """

    rank: int
    cores: tuple[int, ...]
    process: Process
    channel: Channel
    log: WorkerLog
    host: str = "127.0.0.1"
    shares_memory: bool = True

    def log_tail(self) -> str:
        """The last lines that the worker printed; of a crash, the top of its Python stack."""
        return self.log.tail()

    def is_ready(self) -> None:
        """It has started: what it said meanwhile is of no use in an error."""
        self.log.begin_here()

    def trim_log(self) -> None:
        """Drops all but the end of a log that has become long."""
        self.log.trim()

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
        how, exit_code, signal = self.how_it_ended()
        what = f"Worker {self.rank} ({self.where()}) {how} while {doing}."
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
        """For people: its process, its cores."""
        return f"pid {self.process.pid}, cores {list(self.cores)}"

    def is_stopped(self) -> bool:
        """Returns True if a signal (SIGSTOP, a debugger) has stopped it."""
        return stalls.is_stopped(self.process.pid)

    def has_answered(self, since: float) -> bool:
        """Returns True if its node has answered since a moment of the clock."""
        return True

    def stack(self) -> str:
        """Its Python stack, as it writes it to its log; or why there is none.

        Whatever holds the GIL there does not keep it from doing so; a stopped process does
        not. Takes up to `STACK_SECONDS`.
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
        """Waits until the process, which was killed, has ended; not forever."""
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:  # it is in the kernel, as of a file system that hangs
            logger.warning(
                "Worker %d (%s) was killed, and has not ended for %g s.",
                self.rank,
                self.where(),
                KILL_SECONDS,
            )

    def close(self) -> None:
        """Lets go of channel and log; the process has ended."""
        self.channel.close()
        self.log.close()


class Crew(Protocol):
    """Starts the workers of a pool, and releases what is left when they have ended.

    Attributes:
        workers: list of `Worker`, those that were started so far, by rank.
    """

    @property
    def workers(self) -> Sequence[Worker]: ...

    def start(self) -> None:
        """Starts the workers."""

    def close(self) -> None:
        """Lets go of what they were started with; they have ended."""


def stacks(workers: Sequence[Worker]) -> list[str]:
    """The Python stacks of workers, all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(workers), "nanotf-stack") as pool:
        return list(pool.map(lambda worker: worker.stack(), workers))
