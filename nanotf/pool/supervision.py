"""Notices workers that make no progress, and says which one is behind a failure.

A `Supervisor` has no thread of its own: whoever waits for a pool's messages tells it what came, and
asks it to look when nothing has come for `LOOK_SECONDS`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from nanotf.console import logger
from nanotf.errors import WorkerDied, WorkerError, WorkerStuck
from nanotf.pool import silence, stalls
from nanotf.pool.handles import OTHERS_STOPPED, Worker, stacks
from nanotf.wire import messages
from nanotf.wire.failures import Kind

LOOK_SECONDS = 1.0  # how often the parent looks around while it waits
SILENT_SECONDS = 10.0  # a node that has not answered for so long has gone
# A rank may hear of a peer's end before the parent does: not long before, if it is on this host.
GRACE_SECONDS = 1.0
REMOTE_GRACE_SECONDS = 5.0
STALL_LOOKS = 3  # ranks begin a step, and look at the clock, not all at the same time


@dataclasses.dataclass
class _Told:
    """A rank's reports of a step that does not end: which step, when last, how many."""

    began: int
    at: float = 0.0
    times: int = 0


class Supervisor:
    """Watches the workers of one pool.

    Args:
        workers: sequence of `Worker`, by rank.
        stall_seconds: float, how long a worker may keep others waiting.
        transport: str, how they exchange gradients.
    """

    def __init__(self, workers: Sequence[Worker], stall_seconds: float, transport: str) -> None:
        self._workers = workers
        self._stall_seconds = stall_seconds
        self._transport = transport
        self._clock = 0.0  # s; see `_now`
        self._looked = time.monotonic()
        self._heard: dict[int, float] = {}  # by rank, when it last said something
        self._stalled: dict[int, _Told] = {}  # by rank
        self._stopped: dict[int, float] = {}  # by rank, since when a signal has stopped it
        self._silence = silence.Silence(stall_seconds)

    def begin_job(self) -> None:
        """Forgets the last job."""
        self._stalled.clear()
        self._silence.begin(range(len(self._workers)), self._now())

    def heard(self, rank: int, message: messages.Message) -> None:
        """Notes that a message of a rank has come."""
        now = self._now()
        if not isinstance(message, messages.Stalled):
            self._silence.heard(rank, now)
        # Progress is not what those wait for who are at a hook, or have ended the job.
        if not isinstance(message, messages.Progress):
            self._heard[rank] = now

    def _now(self) -> float:
        """A clock in seconds for which time does not count in which this process does not look.

        It may be frozen then, and its workers with it, or in a callback, for which they wait.
        """
        before, self._looked = self._looked, time.monotonic()
        self._clock += min(self._looked - before, 2 * LOOK_SECONDS)
        return self._clock

    def check_progress(
        self, present: Collection[int], reading: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Looks whether a worker keeps the others waiting for too long.

        Args:
            present: ranks that wait for the others, in the parent's answer.
            reading: callable, returns the stacks of this process's threads that read data for
                them.

        Raises:
            WorkerStuck: One does.
        """
        now = self._now()
        for worker in self._workers:
            if not worker.is_stopped():
                self._stopped.pop(worker.rank, None)
            elif now - self._stopped.setdefault(worker.rank, now) > self._stall_seconds:
                raise self.stuck([worker.rank], "a signal (SIGSTOP) has stopped it")
        self._report_silence(present, now, reading)
        if not present:
            return
        began = min(self._heard.get(rank, now) for rank in present)
        late = [
            rank
            for rank in range(len(self._workers))
            if rank not in present
            and now - max(began, self._heard.get(rank, began)) > self._stall_seconds
        ]
        if late:
            raise self.stuck(late, f"the workers {sorted(present)} wait for it")

    def _report_silence(
        self, present: Collection[int], now: float, reading: Callable[[], Sequence[str]]
    ) -> None:
        """Warns about workers without progress for which no other worker waits."""
        if self._stalled:  # they look at the clock themselves, and say so
            return
        late, seconds = self._silence.look(present, now)
        if not late:
            return
        who = ", ".join(f"{rank} ({self._workers[rank].where()})" for rank in late)
        lines = [
            f"Worker {who} has done no step and no collective for {seconds:.0f} s, and nobody "
            "knows whether it will. It may be busy (a compiler, a long step), wait for your data, "
            "or hang. Training keeps waiting; interrupt it (Ctrl-C) if what follows looks wrong. "
            f"Set {stalls.STALL_VARIABLE} to hear of it later."
        ]
        lines += self._stacks_of_workers()
        lines += [f"This process reads data for them:\n{stack}" for stack in reading()]
        logger.warning("%s", "\n\n".join(lines))

    def _stacks_of_workers(self) -> list[str]:
        return [
            f"Python stacks of worker {worker.rank}:\n{stack}"
            for worker, stack in zip(self._workers, stacks(self._workers), strict=True)
        ]

    def note_stalled(self, rank: int, message: messages.Stalled) -> None:
        """Hears that a rank's step does not end; after some looks the others have said so, too.

        Raises:
            WorkerStuck: It has said so at `STALL_LOOKS` looks.
        """
        now = time.monotonic()
        told = self._stalled.get(rank)
        if told is None or told.began != message.began:
            told = self._stalled[rank] = _Told(message.began)
        # Messages that came while this process was stopped are one.
        if now - told.at > LOOK_SECONDS / 2:
            told.at, told.times = now, told.times + 1
        if told.times < STALL_LOOKS:
            return
        late = [other for other in range(len(self._workers)) if other not in self._stalled]
        if late:
            raise self.stuck(late, f"the workers {sorted(self._stalled)} are in a step without it")
        raise self.stuck(
            range(len(self._workers)),
            "their step does not end, and TensorFlow does not say who waits for whom",
        )

    def stuck(self, ranks: Sequence[int], why: str) -> WorkerStuck:
        """The error that names the workers without progress, and where all workers are.

        Args:
            ranks: sequence of int, the workers for which the others wait.
            why: str, what says so.
        """
        who = ", ".join(f"{rank} ({self._workers[rank].where()})" for rank in ranks)
        what = f"Worker {who} made no progress for {self._stall_seconds:g} s: {why}."
        lines = [f"{what} {OTHERS_STOPPED} Set {stalls.STALL_VARIABLE} to wait longer."]
        lines += self._stacks_of_workers()
        return self._workers[ranks[0]].error(WorkerStuck, "\n\n".join(lines), what=what)

    def explain(self, message: messages.JobFailed) -> WorkerError | None:
        """The error of the worker that is behind another's, or None if that worker says all.

        A rank that waits for another in a collective may notice first that this one has ended
        or does not come.
        """
        why = message.failure
        if why is not None and why.kind == Kind.EXPIRED and why.missing:
            return self.stuck(why.missing, why.text)
        waits = self._transport == "grpc" or (why is not None and why.kind == Kind.LOST)
        is_local = all(worker.shares_memory for worker in self._workers)
        grace = GRACE_SECONDS if is_local else REMOTE_GRACE_SECONDS
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            silent = [worker for worker in self._workers if not worker.has_answered(began)]
            ended = [worker for worker in self._workers if worker.process.poll() is not None]
            if ended or (silent and waited > SILENT_SECONDS):
                died: WorkerDied = (ended or silent)[0].died("a job ran")
                return died
            if not silent and (not waits or waited > grace):
                return None
            time.sleep(0.01)


def not_finished(workers: Sequence[Worker], doing: str, seconds: float) -> WorkerError:
    """The error for workers that have not done something for so long, such as "starting"."""
    text = f"Workers {[w.rank for w in workers]} did not finish {doing} within {seconds:.0f} s."
    stopped = [w.rank for w in workers if w.is_stopped()]
    if stopped:
        text += f" A signal (SIGSTOP) has stopped {stopped}."
    error: WorkerError = workers[0].error(WorkerError, text)
    return error
