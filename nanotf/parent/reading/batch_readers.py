"""The reader processes of one call: a pool of items whose items are batches of the user's datasets.

    caller's threads            a thread for each reader      reader (`worker.reading_session`)
      read() gives a batch  ->                                  reads
      waits for its future        sets the future           <-  answers; the batch lies in a slot
                                  gives the next            ->
                                this call's thread
                                  gone? its batches go back, another process starts

A reader has `AHEAD` batches, so that it never waits for the parent. Batches are given in the order
of `read`. The lock guards everything; nobody waits while holding it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from nanotf.compat.process_state import ProcessState
from nanotf.console import logger
from nanotf.errors import NanoError, ReaderDied, WorkerDied
from nanotf.machine import topology
from nanotf.pool import interrupts, stalls
from nanotf.pool.items import ItemPool, Joined, NotStarted, WorkerGone
from nanotf.pool.pool import Delivery
from nanotf.pool.starts import START_TRIES, started
from nanotf.pool.supervision import POLL_SECONDS
from nanotf.pool.transports import READS
from nanotf.shipping import orders
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.own_threads import OwnThread

AHEAD = 2  # batches that a reader has at a time
END_SECONDS = 20.0  # for the thread, which kills the processes

Future = concurrent.futures.Future  # of a `ReadBatch`


@dataclasses.dataclass(frozen=True)
class ReadBatch:
    """An answer of a reader."""

    # `orders.BatchRead`, or `messages.OrderFailed` if reading raised
    found: Any
    # An array of bytes with the batch's large arrays, or None. The reader uses the memory again
    # when nothing refers to the array.
    slot: Any
    where: str  # the reader, for people


@dataclasses.dataclass(frozen=True)
class Published:
    """A dataset that readers know."""

    dataset: int  # its number in the call
    seed: int  # the call's
    nbytes: int  # the size of its pickle
    blocks: tuple[Block, ...]  # the pickle's, then those of large arrays
    state: ProcessState  # this process's


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A batch that somebody has asked for."""

    dataset: int
    index: int
    moment: orders.ReadMoment
    future: Future[ReadBatch] = dataclasses.field(default_factory=concurrent.futures.Future)


class _Seat:
    """A reader's place, which another process takes when one has ended."""

    def __init__(self) -> None:
        self.ready = False
        self.lost = False  # whether no process takes it any more
        self.running: collections.deque[_Reading] = collections.deque()  # answered in order
        self.blocks: dict[int, Block] = {}  # the process's slots
        self.free: collections.deque[int] = collections.deque()  # slots to return

    def vacate(self) -> list[_Reading]:
        """Forgets the process that has ended; returns what it was to read."""
        self.ready, left = False, list(self.running)
        self.running.clear()
        # Not emptied: finalizers of the old process's slots still append to their deque.
        self.blocks, self.free = {}, collections.deque()
        return left


class BatchReaders:
    """The readers of one call, which start with `begin`.

    Args:
        max_restarts: how many readers that end are replaced.
    """

    def __init__(self, placements: Sequence[topology.Placement], max_restarts: int) -> None:
        self.stall_seconds = stalls.stall_seconds()
        self._owner = os.getpid()
        self._max_restarts = max_restarts
        self._restarts = 0
        self._lock = threading.RLock()
        self._adding = threading.Lock()  # taken before the other
        self._pending: collections.deque[_Reading] = collections.deque()
        self._published: dict[int, Published] = {}
        self._failure: BaseException | None = None
        self._closing = False
        self._pool: ItemPool | None = None
        self._seats = [_Seat() for _ in placements]
        plan = topology.Plan(tuple(placements))
        context = contextvars.copy_context()
        self._thread = OwnThread(
            target=context.run, args=(self._run, plan), name="nanotf-readers", daemon=True
        )

    def begin(self) -> None:
        """Starts the readers, without waiting for them. Then `close` must follow."""
        self._thread.start()

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, placement: topology.Placement) -> bool:
        """Starts one more reader beside those that run, without waiting for it.

        Args:
            placement: its rank is the number of readers.

        Returns:
            False if there is no process for it.
        """
        with self._adding:
            with self._lock:
                pool = self._pool
                if pool is None or self._closing or self._failure is not None:
                    return False
                self._seats.append(_Seat())
            try:
                pool.add(placement)  # without the lock: the others read on
            except WorkerDied as error:
                logger.warning("%s The other readers read its batches.", error.what)
                with self._lock:
                    self._seats.pop()  # its own: `_adding` keeps others from adding one
                return False
            return True

    # ------------------------------------------------------------------------------ reading
    def publish(self, published: Published) -> None:
        """Makes a dataset known as it is now; batches are read so from now on."""
        with self._lock:
            self._published[published.dataset] = published
            for rank, seat in enumerate(self._seats):
                if seat.ready:
                    self._tell(rank, published)

    def read(self, dataset: int, index: int, moment: orders.ReadMoment) -> Future[ReadBatch]:
        """Requests a batch of a published dataset; returns its future."""
        reading = _Reading(dataset, index, moment)
        with self._lock:
            if self._closing:
                reading.future.set_exception(ended())
            elif self._failure is not None:
                reading.future.set_exception(self._failure)
            else:
                self._pending.append(reading)
                self._hand_out()
        return reading.future

    def describe(self, future: Future[ReadBatch]) -> str:
        """Says what has become of a batch that does not come; with the reader's Python stack."""
        with self._lock:
            ranks = [
                rank
                for rank, seat in enumerate(self._seats)
                if any(reading.future is future for reading in seat.running)
            ]
            worker = self._pool.workers[ranks[0]] if self._pool is not None and ranks else None
        if worker is None:
            return "no reader has begun it"
        # Without the lock: a stack takes seconds, and the other readers work meanwhile.
        return f"reader {worker.rank} ({worker.where()}) reads it:\n{worker.stack()}"

    def _hand_out(self) -> None:
        """Gives batches to readers that have fewest; called with the lock held."""
        while self._pending:
            ranks = [
                rank
                for rank, seat in enumerate(self._seats)
                if seat.ready and len(seat.running) < AHEAD
            ]
            if not ranks:
                return
            rank = min(ranks, key=lambda each: len(self._seats[each].running))
            reading, seat = self._pending.popleft(), self._seats[rank]
            if reading.future.cancelled():
                continue
            seat.running.append(reading)
            # So many: finalizers may append to it meanwhile.
            free = tuple(seat.free.popleft() for _ in range(len(seat.free)))
            order = orders.ReadOrder(reading.dataset, reading.index, reading.moment, free)
            self._send(rank, order)

    def _tell(self, rank: int, published: Published) -> None:
        """Sends a dataset to a reader; called with the lock held."""
        order = orders.DatasetOrder(
            published.dataset,
            published.seed,
            published.nbytes,
            tuple(block.nbytes for block in published.blocks),
        )
        fds = tuple(block.fd for block in published.blocks if block.fd is not None)
        self._send(rank, order, fds, published.state)

    def _send(self, rank: int, order: Any, fds: tuple[int, ...] = (), state: Any = None) -> None:
        pool = self._pool
        assert pool is not None, "a reader is ready"
        # Without the user's objects in it, the standard pickle is enough, and ten times as fast.
        message = messages.Order(pool.next_order(), pickle.dumps(order), (), fds, state)
        pool.send_to(rank, message)

    # ----------------------------------------------------------------------------- the thread
    def _run(self, plan: topology.Plan) -> None:
        pool = None
        try:
            pool = started(lambda: ItemPool(plan, READS, self._take), lambda: self._closing)
            with self._lock:
                self._pool = pool
                for rank in range(pool.size):
                    self._is_ready(rank)
            while not self._closing:
                if (event := pool.event(POLL_SECONDS)) is not None:
                    rank, found = event
                    self._ON_EVENT[type(found)](self, pool, rank, found)
        except WorkerDied as error:
            self._fail(_not_started(error))
        except BaseException as error:  # raised in the threads that wait for batches
            self._fail(error)
        finally:
            if pool is not None:
                pool.kill()

    def _take(self, rank: int, message: Any) -> None:
        self._ON_MESSAGE[type(message)](self, rank, message)

    def _is_ready(self, rank: int) -> None:
        with self._lock:
            self._seats[rank].ready = True
            for published in self._published.values():
                self._tell(rank, published)
            self._hand_out()

    def _on_joined(self, pool: ItemPool, rank: int, event: Any) -> None:
        self._is_ready(rank)

    def _on_new_slot(self, rank: int, delivery: Any) -> None:
        self._seats[rank].blocks[delivery.message.value] = delivery.block

    def _on_read(self, rank: int, message: Any) -> None:
        found, slot, seat = message.result, None, self._seats[rank]
        if found.slot >= 0:
            block = seat.blocks[found.slot]
            slot = block.array(0, (block.nbytes,), "u1")
            # A finalizer may run anywhere, even while a thread sends: it only notes the number.
            weakref.finalize(slot, seat.free.append, found.slot).atexit = False
        self._answer(rank, found, slot)

    def _on_failed(self, rank: int, message: Any) -> None:
        self._answer(rank, message, None)

    def _answer(self, rank: int, found: Any, slot: Any) -> None:
        with self._lock:
            if self._pool is None or not self._seats[rank].running:
                return  # the readers have been closed, or have failed
            reading = self._seats[rank].running.popleft()
            where = f"reader {rank}, {self._pool.workers[rank].where()}"
            self._hand_out()
        _finish(reading, ReadBatch(found, slot, where))

    def _on_gone(self, pool: ItemPool, rank: int, gone: Any) -> None:
        """Puts the batches of a reader that has ended back; raises if too many have ended."""
        with self._lock:
            left = self._seats[rank].vacate()
            self._pending.extendleft(reversed(left))  # somebody has waited for them longest
            if self._closing:
                return
            self._hand_out()
        died = gone.worker.died(f"it read batch {left[0].index}" if left else "it waited")
        self._restarts += 1
        if self._restarts > self._max_restarts:
            number = self._max_restarts
            why = f"max_restarts={number} allows {number} new ones in a call."
            raise died.retold(ReaderDied, f"{died.what} {why}")
        logger.warning(
            "%s Its batches are read again: restart %d of %d.",
            died.what,
            self._restarts,
            self._max_restarts,
        )
        pool.replace(rank)

    def _on_not_started(self, pool: ItemPool, rank: int, event: Any) -> None:
        with self._lock:
            self._seats[rank].lost = True
            none_left = all(seat.lost for seat in self._seats)
        if none_left:
            raise _not_started(event.error)
        logger.warning("%s The other readers read its batches.", event.error.what)

    # By the class of an event of the pool.
    _ON_EVENT: ClassVar[Mapping[type, Callable[[BatchReaders, ItemPool, int, Any], None]]] = {
        Joined: _on_joined,
        NotStarted: _on_not_started,
        WorkerGone: _on_gone,
    }
    # By the class of a reader's message; called in the thread that reads its channel.
    _ON_MESSAGE: ClassVar[Mapping[type, Callable[[BatchReaders, int, Any], None]]] = {
        Delivery: _on_new_slot,
        messages.OrderDone: _on_read,
        messages.OrderFailed: _on_failed,
    }

    # ------------------------------------------------------------------------------- ending
    def _fail(self, error: BaseException) -> None:
        """Makes all batches, and those to come, raise an error."""
        with self._lock:
            self._failure = self._failure or error
            left = [*self._pending, *itertools.chain(*(seat.vacate() for seat in self._seats))]
            self._pending.clear()
        for reading in left:
            _finish(reading, error)

    def close(self) -> None:
        """Kills the readers; batches that somebody waits for raise."""
        if self._owner != os.getpid():  # after a fork, the readers belong to the parent
            return
        with self._lock:
            self._closing, pool = True, self._pool
            if pool is not None:
                pool.post(messages.Woken())
        if pool is not None:  # else the thread kills the processes once they have started
            with interrupts.held_back():
                interrupts.wait_for(self._thread, END_SECONDS)
        self._fail(ended())
        self._published.clear()  # TensorFlow keeps what it has read from for a while
        self._pool = self._failure = None


def _not_started(died: WorkerDied) -> ReaderDied:
    return died.retold(ReaderDied, f"{died.what} It was started {START_TRIES} times.")


def _finish(reading: _Reading, result: ReadBatch | BaseException) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody wants it any more
        if isinstance(result, BaseException):
            reading.future.set_exception(result)
        else:
            reading.future.set_result(result)


def ended() -> NanoError:
    """Returns the error for a read after a call."""
    return NanoError(
        "A dataset is read by reader processes only during its call. Received: a read after the "
        "call has ended. Read the dataset itself instead."
    )
