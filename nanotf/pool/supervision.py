"""Notices workers that make no progress, and names the worker that caused a failure.

A `PoolSupervisor` has no thread of its own. The thread that waits for a pool's messages passes them
on, and asks it to check when no message has come for `POLL_SECONDS`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from nanotf.console import logger
from nanotf.errors import WorkerError, WorkerStuck
from nanotf.pool import silence, stalls
from nanotf.pool.handles import OTHERS_STOPPED, Worker, stacks
from nanotf.wire import messages
from nanotf.wire.failures import FailureKind

POLL_SECONDS = 1.0  # how often the parent checks the workers while it waits
SILENT_SECONDS = 10.0  # a node that has not answered for this long is lost
# A rank may notice a peer's end before the parent does: shortly before, if it is on this host.
GRACE_SECONDS = 1.0
REMOTE_GRACE_SECONDS = 5.0
STALL_LOOKS = 3  # ranks begin a step, and read the clock, at slightly different times


@dataclasses.dataclass
class _Told:
    """A rank's reports of a step that does not end."""

    began: int  # when the step began, by `timing.now` there
    at: float = 0.0  # when the last report came, by `time.monotonic`
    times: int = 0  # number of reports


class PoolSupervisor:
    """Watches the workers of one pool.

    Args:
        workers: by rank.
        stall_seconds: how long a worker may keep others waiting.
    """

    def __init__(self, workers: Sequence[Worker], stall_seconds: float, transport: str) -> None:
        self._workers = workers
        self._stall_seconds = stall_seconds
        self._transport = transport
        self._clock = 0.0  # s; see `_now`
        self._looked = time.monotonic()
        self._heard: dict[int, float] = {}  # by rank, the time of its last message
        self._stalled: dict[int, _Told] = {}  # by rank
        self._stopped: dict[int, float] = {}  # by rank, when a signal was first seen to stop it
        self._silence = silence.Silence(stall_seconds)

    def begin_order(self) -> None:
        """Forgets the last order."""
        self._stalled.clear()
        self._silence.begin(range(len(self._workers)), self._now())

    def heard(self, rank: int, message: messages.Message) -> None:
        """Records that a message of a rank has come."""
        now = self._now()
        if not isinstance(message, messages.Stalled):
            self._silence.heard(rank, now)
        # Ranks at a hook, or at the call's end, wait for other messages than `Progress`.
        if not isinstance(message, messages.Progress):
            self._heard[rank] = now

    def _now(self) -> float:
        """Returns a time in seconds that stands still while this process does not check.

        It may be frozen together with its workers, or run a callback for which they wait.
        """
        before, self._looked = self._looked, time.monotonic()
        self._clock += min(self._looked - before, 2 * POLL_SECONDS)
        return self._clock

    def check_progress(
        self, present: Collection[int], reading: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Checks that no worker keeps the others waiting for too long.

        Args:
            present: ranks that wait for the parent's answer, and so for the others.
            reading: returns the stacks of this process's threads that read data for them.

        Raises:
            WorkerStuck: A worker keeps the others waiting.
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
        """Warns about workers that have made no progress while no other worker waits for them."""
        if self._stalled:  # workers check the clock themselves, and report stalls
            return
        late, seconds = self._silence.check(present, now)
        if not late:
            return
        who = ", ".join(f"{rank} ({self._workers[rank].where()})" for rank in late)
        lines = [
            f"Worker {who} has done no step and no collective for {seconds:.0f} s. nanotf cannot "
            "tell whether it is busy (a compiler, a long step), waits for your data, or hangs. "
            "Training keeps waiting; interrupt it (Ctrl-C) if the stacks below look wrong. "
            f"Set {stalls.STALL_VARIABLE} to be warned later."
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
        """Records a rank's report that its step does not end. Others may report it later.

        Raises:
            WorkerStuck: The rank has reported the step `STALL_LOOKS` times.
        """
        now = time.monotonic()
        told = self._stalled.get(rank)
        if told is None or told.began != message.began:
            told = self._stalled[rank] = _Told(message.began)
        # Messages that came while this process was stopped count as one.
        if now - told.at > POLL_SECONDS / 2:
            told.at, told.times = now, told.times + 1
        if told.times < STALL_LOOKS:
            return
        late = [other for other in range(len(self._workers)) if other not in self._stalled]
        if late:
            raise self.stuck(late, f"the workers {sorted(self._stalled)} are in a step without it")
        raise self.stuck(
            range(len(self._workers)),
            "their step does not end, and TensorFlow does not report which worker waits for which",
        )

    def stuck(self, ranks: Sequence[int], why: str) -> WorkerStuck:
        """Returns the error that names the workers without progress, and shows all stacks.

        Args:
            ranks: the workers for which the others wait.
            why: the evidence.
        """
        who = ", ".join(f"{rank} ({self._workers[rank].where()})" for rank in ranks)
        what = f"Worker {who} has made no progress for {self._stall_seconds:g} s: {why}."
        lines = [f"{what} {OTHERS_STOPPED} Set {stalls.STALL_VARIABLE} to wait longer."]
        lines += self._stacks_of_workers()
        return self._workers[ranks[0]].error(WorkerStuck, "\n\n".join(lines), what=what)

    def explain(self, message: messages.OrderFailed) -> WorkerError | None:
        """Returns the error of the worker that caused another's error, or None if none did.

        A rank that waits in a collective may be the first to notice that another rank has ended
        or does not come.
        """
        why = message.failure
        if why is not None and why.kind == FailureKind.EXPIRED and why.missing:
            return self.stuck(why.missing, why.text)
        # A rank that has ended may be the cause: with grpc of any error, else of `LOST`.
        waits = self._transport == "grpc" or (why is not None and why.kind == FailureKind.LOST)
        is_local = all(worker.shares_memory for worker in self._workers)
        grace = GRACE_SECONDS if is_local else REMOTE_GRACE_SECONDS
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            silent = [worker for worker in self._workers if not worker.has_answered(began)]
            ended = [worker for worker in self._workers if worker.process.poll() is not None]
            # A node that is gone reports no exit code: its silence counts as the end.
            if ended or (silent and waited > SILENT_SECONDS):
                died: WorkerError = (ended or silent)[0].died("a call ran")
                return died
            if not silent and (not waits or waited > grace):
                return None
            time.sleep(0.01)


def not_finished(workers: Sequence[Worker], doing: str, seconds: float) -> WorkerError:
    """Returns the error for workers that did not finish an action, such as "starting", in time."""
    ranks = [w.rank for w in workers]
    text = f"{workers[0].title}s {ranks} did not finish {doing} within {seconds:.0f} s."
    stopped = [w.rank for w in workers if w.is_stopped()]
    if stopped:
        text += f" A signal (SIGSTOP) has stopped {stopped}."
    error: WorkerError = workers[0].error(WorkerError, text)
    return error
