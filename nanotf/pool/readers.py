"""Processes that read the user's datasets for one call, see `wire.reader_messages`.

    caller's threads            seat (a thread per reader)        reader
      read() puts a task   ->     starts the process       ->       forked as workers are
      waits for its future        hands out tasks          ->       reads
                                  sets the future          <-       answers
                                  process gone? its tasks go back, another is started

A reader has `AHEAD` tasks, so that it never waits for the parent. Tasks are handed out in the order
of `read`. The lock guards everything; nobody waits while holding it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import secrets
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from nanotf.compat.process_state import ProcessState
from nanotf.console import logger
from nanotf.errors import NanoError, ReaderDied, WorkerDied, WorkerError
from nanotf.machine import topology
from nanotf.pool import stalls
from nanotf.pool.forks import Forks
from nanotf.pool.handles import DEATH_SECONDS
from nanotf.pool.handshake import START_SECONDS, greet
from nanotf.pool.local import LocalWorker, worker_variables
from nanotf.pool.starts import LONGEST_PAUSE, PAUSE_SECONDS
from nanotf.pool.supervision import not_finished
from nanotf.wire import messages, reader_messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import KEY_NBYTES, ChannelClosed

AHEAD = 2  # tasks that a reader has at a time
END_SECONDS = 20.0  # for the threads, once the processes are killed

Future = concurrent.futures.Future  # of a `ReadBatch`


@dataclasses.dataclass(frozen=True)
class ReadBatch:
    """An answer of a reader."""

    message: Any  # `BatchRead` or `BatchFailed`
    # An array of bytes with the batch's large arrays, or None. The reader uses the memory again
    # when nothing refers to the array.
    slot: Any = None
    where: str = ""  # the reader, for people


@dataclasses.dataclass(frozen=True)
class Published:
    """A dataset that readers know."""

    dataset: int  # its number in the call
    seed: int  # the call's
    nbytes: int  # the size of its pickle
    blocks: tuple[Block, ...]  # the pickle's, then those of large arrays
    state: ProcessState  # this process's


class _Task:
    def __init__(self, read: reader_messages.Read) -> None:
        self.read = read
        self.future: Future[ReadBatch] = Future()


class ReaderProcess(LocalWorker):
    """A reader's process.

    Args:
        max_restarts: of the call, for errors.
        *arguments: as for `LocalWorker`.
    """

    kind, title = "reader", "Reader"

    def __init__(self, max_restarts: int, *arguments: Any) -> None:
        self._max_restarts = max_restarts
        super().__init__(*arguments)

    def died(self, doing: str) -> ReaderDied:
        """Returns the error that reports how the reader ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DEATH_SECONDS)
        self.process.kill()  # if it has closed its channel and still runs
        how, exit_code, signal = self.how_it_ended()
        what = f"{self.title} {self.rank} ({self.where()}) {how} while {doing}."
        number = self._max_restarts
        return self.error(
            ReaderDied,
            f"{what} max_restarts={number} allows {number} new ones in a call.",
            exit_code=exit_code,
            signal=signal,
            what=what,
        )


class _Seat:
    """A reader's place, which another process takes when one has ended."""

    def __init__(self, placement: topology.Placement) -> None:
        self.placement = placement
        self.process: ReaderProcess | None = None
        self.ready = False
        self.running: collections.deque[_Task] = collections.deque()
        self.thread: threading.Thread
        self.vacate()

    def vacate(self) -> None:
        """Forgets what the last process knew."""
        self.ready = False
        self.blocks: dict[int, Block] = {}  # its slots
        self.free: collections.deque[int] = collections.deque()  # slots to return
        self.known: dict[int, set[int]] = {}  # the numbers of each dataset's blocks that it has


class ReaderPool:
    """The readers of one call.

    Args:
        max_restarts: how many readers that end are replaced.
    """

    def __init__(self, placements: Sequence[topology.Placement], max_restarts: int) -> None:
        self._owner = os.getpid()
        self._key = secrets.token_bytes(KEY_NBYTES)
        self._max_restarts = max_restarts
        self.stall_seconds = stalls.stall_seconds()
        self._lock = threading.RLock()
        self._pending: collections.deque[_Task] = collections.deque()
        self._published: dict[int, Published] = {}
        self._numbers: weakref.WeakKeyDictionary[Block, int] = weakref.WeakKeyDictionary()
        self._counter = itertools.count()
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._restarts = 0
        self._forks = Forks()
        self._seats: list[_Seat] = []
        for placement in placements:
            self.add(placement)

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, placement: topology.Placement) -> None:
        """Starts one more reader, without waiting for it."""
        seat = _Seat(placement)
        name = f"nanotf-reader-{placement.rank}"
        seat.thread = threading.Thread(target=self._fill, args=(seat,), name=name, daemon=True)
        with self._lock:
            self._seats.append(seat)
        seat.thread.start()

    def pids(self) -> list[int]:
        """Returns the process ids of the readers that are ready."""
        with self._lock:
            return [s.process.process.pid for s in self._seats if s.ready and s.process is not None]

    # ------------------------------------------------------------------------------ reading
    def publish(self, published: Published) -> None:
        """Makes a dataset known as it is now; later tasks read it so."""
        with self._lock:
            self._published[published.dataset] = published
            for block in published.blocks:
                self._numbers.setdefault(block, next(self._counter))
            for seat in self._seats:
                if seat.ready:
                    self._tell(seat, published)

    def read(
        self, dataset: int, index: int, moment: reader_messages.ReadMoment
    ) -> Future[ReadBatch]:
        """Requests a batch of a published dataset; returns its future."""
        with self._lock:
            task = _Task(reader_messages.Read(next(self._counter), dataset, index, moment))
            if self._closing.is_set():
                task.future.set_exception(ended())
            elif self._failure is not None:
                task.future.set_exception(self._failure)
            else:
                self._pending.append(task)
                self._hand_out()
        return task.future

    def describe(self, future: Future[ReadBatch]) -> str:
        """Says what has become of a batch that does not come; with the reader's Python stack."""
        with self._lock:
            found = [s for s in self._seats if any(t.future is future for t in s.running)]
            process = found[0].process if found else None
        if process is None:
            return "no reader has begun it"
        # Without the lock: a stack takes seconds, and the other readers work meanwhile.
        return f"reader {process.rank} ({process.where()}) reads it:\n{process.stack()}"

    def _hand_out(self) -> None:
        """Gives tasks to readers that have fewest; called with the lock held."""
        while self._pending:
            seats = [seat for seat in self._seats if seat.ready and len(seat.running) < AHEAD]
            if not seats:
                return
            seat = min(seats, key=lambda each: len(each.running))
            task = self._pending.popleft()
            if task.future.cancelled():
                continue
            seat.running.append(task)
            free = tuple(seat.free.popleft() for _ in range(len(seat.free)))
            self._send(seat, dataclasses.replace(task.read, free=free))

    def _tell(self, seat: _Seat, published: Published) -> None:
        """Sends a dataset to a reader; called with the lock held."""
        numbers = {self._numbers[block]: block for block in published.blocks}
        known = set().union(*seat.known.values())
        new = {number: block for number, block in numbers.items() if number not in known}
        seat.known[published.dataset] = set(numbers)
        first, *rest = numbers
        message = reader_messages.Dataset(
            published.dataset,
            published.seed,
            first,
            published.nbytes,
            tuple(rest),
            tuple((number, block.nbytes) for number, block in new.items()),
            published.state,
        )
        self._send(seat, message, [block.fd for block in new.values() if block.fd is not None])

    def _send(self, seat: _Seat, message: messages.Message, fds: Sequence[int] = ()) -> None:
        assert seat.process is not None
        try:
            seat.process.channel.send(message, fds)
        except ChannelClosed:
            seat.ready = False  # its thread notices, and puts its tasks back

    # ---------------------------------------------------------------- the thread of a seat
    def _fill(self, seat: _Seat) -> None:
        try:
            tries = 0  # without a start
            while not self._closing.is_set():
                try:
                    self._start(seat)
                    tries = 0
                    self._converse(seat)
                except ChannelClosed:
                    self._clear(seat)
                except (ReaderDied, WorkerDied) as error:  # while it started
                    self._count(error)
                    self._closing.wait(min(PAUSE_SECONDS * 2**tries, LONGEST_PAUSE))
                    tries += 1
                self._leave(seat)
        except BaseException as error:
            self._fail(error)

    def _start(self, seat: _Seat) -> None:
        state = ProcessState.capture(early=True)
        environ = worker_variables(seat.placement, os.environ)
        of_worker = (
            seat.placement,
            self._key,
            reader_messages.READS,
            environ,
            self._forks.zygote(environ),
        )
        process = ReaderProcess(self._max_restarts, *of_worker)
        with self._lock:
            seat.process = process
            if self._closing.is_set():  # `close` has not seen the process
                process.process.kill()
        hello = self._greeted(process)
        for warning in hello.warnings:
            logger.warning("Reader %d: %s", process.rank, warning)
        setup = messages.Setup(state, 1, self.stall_seconds)
        process.channel.send(setup)
        process.channel.limit(0)  # a batch may take any time
        process.is_ready()
        with self._lock:
            seat.ready = True
            for published in self._published.values():
                self._tell(seat, published)
            self._hand_out()

    def _greeted(self, process: ReaderProcess) -> messages.Hello:
        greet(process, self._key, time.monotonic() + START_SECONDS)
        try:
            hello: messages.Hello = process.channel.receive()
        except BlockingIOError as error:
            raise not_finished([process], "starting", START_SECONDS) from error
        except ChannelClosed as error:
            raise process.died("starting") from error
        return hello

    def _converse(self, seat: _Seat) -> None:
        process = seat.process
        assert process is not None
        where = f"reader {process.rank}, {process.where()}"
        while True:
            message = process.channel.receive()
            slot = None
            if isinstance(message, reader_messages.BatchRead) and message.slot >= 0:
                slot = self._slot(seat, process, message)
            with self._lock:
                task = seat.running.popleft()
                assert task.read.number == message.number, "a reader answers in order"
                self._hand_out()
            _finish(task, ReadBatch(message, slot, where))
            del slot, task, message  # nothing may keep a slot while this thread waits

    def _slot(self, seat: _Seat, process: ReaderProcess, message: reader_messages.BatchRead) -> Any:
        if message.block is not None:
            fd = process.channel.receive_fds(1)[0]
            seat.blocks[message.slot] = Block(message.block, fd)
        block = seat.blocks[message.slot]
        slot = block.array(0, (block.nbytes,), "u1")
        # A finalizer may run anywhere, even while this thread sends: it only notes the number.
        weakref.finalize(slot, seat.free.append, message.slot).atexit = False
        return slot

    def _clear(self, seat: _Seat) -> None:
        """Puts the tasks of a reader that has ended back; raises if too many have ended."""
        process = seat.process
        assert process is not None
        with self._lock:
            seat.vacate()
            tasks = list(seat.running)
            seat.running.clear()
            self._pending.extendleft(reversed(tasks))  # somebody has waited for them longest
            if self._closing.is_set():
                return
            self._hand_out()
        doing = f"it read batch {tasks[0].read.index}" if tasks else "it waited"
        self._count(process.died(doing))

    def _leave(self, seat: _Seat) -> None:
        """Frees what a reader that has ended leaves; `close` does so at the end."""
        with self._lock:
            if self._closing.is_set():
                return
            process, seat.process = seat.process, None
        if process is not None:
            process.process.kill()
            process.close()

    def _count(self, died: WorkerError) -> None:
        """Counts a reader that has ended; raises if too many have."""
        with self._lock:
            if self._closing.is_set():
                return
            self._restarts += 1
            restarts = self._restarts
        if restarts > self._max_restarts:
            raise died
        logger.warning(
            "%s Its batches are read again: restart %d of %d.",
            died.what,
            restarts,
            self._max_restarts,
        )

    # ------------------------------------------------------------------------------- ending
    def _fail(self, error: BaseException) -> None:
        """Makes all tasks, and those to come, raise an error."""
        with self._lock:
            if self._closing.is_set():
                return
            self._failure = error
            tasks = [*self._pending, *itertools.chain(*(seat.running for seat in self._seats))]
            self._pending.clear()
        for task in tasks:
            _finish(task, error)

    def close(self) -> None:
        """Kills the readers; tasks that somebody waits for raise."""
        if self._owner != os.getpid():  # after a fork, the readers belong to the parent
            return
        with self._lock:
            self._closing.set()
            seats = list(self._seats)
            for seat in seats:
                if seat.process is not None and seat.process.process.poll() is None:
                    seat.process.process.kill()
        for seat in seats:
            if seat.process is not None:
                seat.process.wait_killed()
                seat.process.channel.shut_down()  # a fork may hold the other end
            seat.thread.join(END_SECONDS)
            if seat.process is not None:
                seat.process.close()
            seat.vacate()  # TensorFlow keeps what it has read from for a while
        self._forks.close()
        for task in [*self._pending, *itertools.chain(*(seat.running for seat in seats))]:
            _finish(task, ended())
        self._published.clear()
        self._failure = None


def _finish(task: _Task, result: ReadBatch | BaseException) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody wants it any more
        if isinstance(result, BaseException):
            task.future.set_exception(result)
        else:
            task.future.set_result(result)


def ended() -> NanoError:
    """Returns the error for a read after a call."""
    return NanoError(
        "A dataset is read by reader processes only during its call. Received: a read after the "
        "call has ended. Read the dataset itself instead."
    )
