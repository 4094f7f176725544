"""Requests and workers find each other: a worker that is free takes what waits.

There is no timer that waits for a batch to fill. At low load a request goes to a worker at once; at
high load requests wait anyway, and a batch forms by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable

from nanotf.console import logger
from nanotf.serving.front.counters import Counters
from nanotf.serving.front.serving_worker import ServingWorker
from nanotf.serving.front.waiting_line import Key, Pending, WaitingLine
from nanotf.serving.interface import Refusal, Response

_BUSY = "The server has as many requests as it can answer in time. Try again later."
_LATE = "The server could not answer in time."
_LOST_CODE = "The process that computed the answer died. See the server's log."
_LOST = (
    "The process that computed the answer died, and so did another one that was asked again. See "
    "the server's log."
)
# Looking through the whole line for each request that is refused would cost more than answering it.
LOOK_SECONDS = 0.05
# A turn of the loop reads what all clients have sent. With hundreds of clients that takes longer
# than a batch; workers that have ended theirs meanwhile get the next before the turn ends.
HEAR_SECONDS = 0.001


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """The limits of what a server takes on."""

    most_rows: int  # that a worker gets at once, as far as requests' sizes tell
    most_waiting: int  # requests
    most_waiting_bytes: int  # of their bodies
    max_latency: float | None  # seconds that a request may take, as estimated; None for any
    timeout: float  # seconds after which a request is given up
    overload_status: int  # of HTTP, for a request that is refused


class Dispatcher:
    """Gives requests to workers.

    Attributes:
        line: what waits.
    """

    def __init__(self, limits: ServerLimits, counters: Counters) -> None:
        self._limits, self._counters = limits, counters
        self.line = WaitingLine()
        self._free: list[ServingWorker] = []
        self._busy: set[ServingWorker] = set()
        self._dismissed: set[ServingWorker] = set()  # of these, those that are to leave
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._looked = -math.inf  # when `drop_unwanted` looked through the line
        self._heard = -math.inf  # when `_hear_workers` ended

    @property
    def is_idle(self) -> bool:
        """True if nobody waits for an answer."""
        return not self.line.count and not self._busy

    # -------------------------------------------------------------------------------- admission
    def submit(self, pending: Pending) -> None:
        """Takes a request.

        Raises:
            Refusal: There is too much to do.
        """
        self._hear_workers()
        why = self._objection(pending)
        if why and time.monotonic() >= self._looked + LOOK_SECONDS:
            self.drop_unwanted()  # clients may have left
            why = self._objection(pending)
        if why:
            self._counters.rejected(why)
            raise Refusal(self._limits.overload_status, _BUSY)
        self.line.add(pending)
        self._schedule()

    def _hear_workers(self) -> None:
        """Takes answers that have come, unless that was done a moment ago."""
        if time.monotonic() < self._heard + HEAR_SECONDS:
            return
        self._heard = math.inf  # not again for requests that an answer makes the server read
        try:
            for worker in list(self._busy):
                worker.hear()
            self._dispatch()
        finally:
            self._heard = time.monotonic()

    def _objection(self, pending: Pending) -> str:
        """Returns which limit a request would exceed; empty if none."""
        limits, line = self._limits, self.line
        if line.count >= limits.most_waiting:
            return "full"
        # One that waits alone is accepted, however large.
        if line.count and line.nbytes + pending.nbytes > limits.most_waiting_bytes:
            return "memory"
        is_late = limits.max_latency is not None and self.seconds_to_wait() > limits.max_latency
        return "latency" if is_late and line.count else ""

    def seconds_to_wait(self) -> float:
        """Estimates how long a request would wait that came now."""
        workers = max(1, len(self._free) + len(self._busy))
        return self.line.seconds(self._limits.most_rows) / workers

    def retry_after(self) -> int:
        """Returns the whole seconds after which a client that was refused should try again."""
        return max(1, math.ceil(self.seconds_to_wait()))

    # ---------------------------------------------------------------------------------- workers
    def is_free(self, worker: ServingWorker) -> None:
        """Takes note of a worker that may get requests."""
        if worker.is_ready and not worker.batch and worker not in self._free:
            self._free.append(worker)
            self._schedule()

    def dismiss(self, worker: ServingWorker) -> None:
        """Lets a worker leave once nothing waits that it alone can answer."""
        self._dismissed.add(worker)
        self._schedule()

    def _let_go(self) -> None:
        for worker in list(self._dismissed):
            if not any(self._is_needed(worker, key) for key in self.line.by_age()):
                self._dismissed.discard(worker)
                worker.leave()

    def _is_needed(self, worker: ServingWorker, key: Key) -> bool:
        others = {each for each in (*self._free, *self._busy) if each.is_ready} - self._dismissed
        return _has(key)(worker) and not any(map(_has(key), others))

    def _may_answer(self, worker: ServingWorker, key: Key) -> bool:
        if worker in self._dismissed:  # it has an older version
            return self._is_needed(worker, key)
        return _has(key)(worker)

    def has_lost(self, worker: ServingWorker) -> None:
        """Handles the requests of a worker that died: each is tried once more, alone."""
        self._busy.discard(worker)
        for pending in reversed(worker.batch):  # each goes to the front of its line
            if pending.is_answered:
                continue
            is_late = time.monotonic() > pending.deadline
            place = worker.place_of(pending.key)
            runs_code = place is not None and worker.options.versions[place].code is not None
            if is_late:
                pending.refuse(Refusal(504, _LATE))
            elif runs_code:  # the user's code may have done something already
                pending.refuse(Refusal(500, _LOST_CODE))
            elif pending.was_lost:
                pending.refuse(Refusal(500, _LOST))
            else:
                pending.was_lost = True
                self.line.add(pending)
        worker.batch = []
        self._schedule()

    def _schedule(self) -> None:
        """Dispatches once this turn of the loop has read what has come."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_scheduled = False
        self._free = [worker for worker in self._free if worker.is_ready]
        self._dismissed = {worker for worker in self._dismissed if worker.is_ready}
        for key in self.line.by_age():
            self._serve(key)
        self._let_go()

    def _serve(self, key: Key) -> None:
        """Gives what waits for a key to workers that are free and have the model."""
        while key in self.line:
            # The last that became free has its caches warm.
            found = (each for each in reversed(self._free) if self._may_answer(each, key))
            worker = next(found, None)
            if worker is None:
                return
            most = self._limits.most_rows
            if self._limits.max_latency is not None:
                within = self.line.costs[key[0]].rows_within(self._limits.max_latency / 2)
                most = math.floor(min(most, within))
            # What is not computed together is not given together: another worker may be free.
            at_once = 1 if worker.computes_one_by_one(key) else self._limits.most_rows
            batch = self.line.take(key, most, at_once)
            if batch:
                self._free.remove(worker)
                self._ask(worker, key, batch)

    def _ask(self, worker: ServingWorker, key: Key, batch: list[Pending]) -> None:
        place = worker.place_of(key)
        assert place is not None, "`_serve` has looked"
        self._busy.add(worker)

        def answered(seconds: float, answers: list[tuple[Response, int]]) -> None:
            self._busy.discard(worker)
            self.is_free(worker)
            rows = sum(rows for _, rows in answers)
            if all(answer.status < 400 for answer, _ in answers):  # others tell nothing of rows
                self.line.costs[key[0]].add(rows, seconds, sum(each.nbytes for each in batch))
            self._counters.computed(key[0], rows, seconds)
            for pending, (answer, _) in zip(batch, answers, strict=True):
                pending.finish(answer)

        try:
            worker.ask(place, batch, answered)
        except OSError as error:
            logger.warning("Requests cannot be given to a worker: %s", error)
            self._busy.discard(worker)
            for pending in batch:
                pending.refuse(Refusal(503, _BUSY))
            self.is_free(worker)

    # ------------------------------------------------------------------------------------- time
    def check_time(self) -> None:
        """Gives up what is late. Called each second."""
        self.drop_unwanted()
        self._let_go()
        now = time.monotonic()
        for worker in list(self._busy):
            for pending in worker.batch:
                if now > pending.deadline:
                    pending.refuse(Refusal(504, _LATE))  # its answer will be dropped
            if now - worker.since > self._limits.timeout:
                logger.warning(
                    "A worker (cores %s) has computed for %.0f s, and is replaced.",
                    list(worker.placement.cores),
                    now - worker.since,
                )
                worker.abort()

    def drop_unwanted(self) -> None:
        """Drops requests that wait, but whose client has left, or whose time is over."""
        self._looked = now = time.monotonic()
        self.line.remove(lambda pending: pending.incoming.has_left)
        for pending in self.line.remove(lambda pending: now > pending.deadline):
            self._counters.rejected("deadline")
            pending.refuse(Refusal(504, _LATE))

    def drop_unserved(self, refusal_of: Callable[[Key], Refusal | None]) -> None:
        """Refuses requests that wait for what no worker has any more."""
        found = [key for key in self.line.by_age() if not any(map(_has(key), self._dismissed))]
        refused = {key: refusal for key in found if (refusal := refusal_of(key))}
        for pending in self.line.remove(lambda pending: pending.key in refused):
            pending.refuse(refused[pending.key])


def _has(key: Key) -> Callable[[ServingWorker], bool]:
    return lambda worker: worker.place_of(key) is not None
