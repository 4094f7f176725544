"""A pool whose workers know nothing of each other, so that each can end and be replaced.

`nanotf.map` runs on it, and the readers of a call's datasets are one. A worker that dies, or that
has used too much memory, gives its cores to a new one while the others work: a thread starts that
one, and announces it in the inbox.

    worker 0   item 0     item 2 x dies     (starts) item 5 ...
    worker 1   item 1         item 3     item 4 ...
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from nanotf.compat.process_state import ProcessState
from nanotf.errors import WorkerDied
from nanotf.machine import topology
from nanotf.pool import handshake, interrupts
from nanotf.pool.handles import Worker
from nanotf.pool.local import LocalCrew
from nanotf.pool.outbox import END_SECONDS, Parcel
from nanotf.pool.pool import Gone, Pool
from nanotf.pool.starts import started
from nanotf.pool.transports import NO_TRANSPORT
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import packed

_POLL_SECONDS = 0.05  # between looks at a thread that starts a worker, while the pool ends


@dataclasses.dataclass(frozen=True)
class WorkerGone:
    """An event: a worker has ended, and all that it has sent was reported before."""

    worker: Worker


@dataclasses.dataclass(frozen=True)
class Joined:
    """An event: a worker that replaces another, or that was added, is ready."""


@dataclasses.dataclass(frozen=True)
class NotStarted:
    """An event: there is no worker that replaces another; each died while it started."""

    error: WorkerDied


class ItemPool(Pool):
    """N live workers on this machine, each of which works by itself.

    Args:
        transport: `NO_TRANSPORT` or `READS`, which says what the workers do.
        take: callable of a rank and its worker's message, in the thread that reads the worker's
            channel: no other thread need be woken for an answer. None makes messages events.

    Raises:
        NanoError: See `Pool`.
    """

    _crew: LocalCrew

    def __init__(
        self,
        plan: topology.Plan,
        transport: str = NO_TRANSPORT,
        take: Callable[[int, Any], None] | None = None,
    ) -> None:
        # Before the workers: `kill` reads them if a start fails.
        self._ending = False
        self._starting: dict[int, threading.Thread] = {}  # by rank; the call's thread writes it
        self._used: set[int] = set()  # ranks whose worker has had a message; likewise
        self._first_memory: dict[int, int] = {}  # by rank, bytes; likewise
        # One fork at a time: the zygote's channel is shared. Also guards `_ending`.
        self._forking = threading.Lock()
        self._take = take
        super().__init__(plan, transport)

    # ------------------------------------------------------------------------------ talking
    def send_to(self, rank: int, message: messages.Order, blocks: Sequence[Block] = ()) -> None:
        """Sends a message, its descriptors, and those of shared blocks, to one worker.

        Does not wait for the worker to read it.

        Raises:
            OSError: This process has no file descriptors left.
        """
        self._used.add(rank)
        fds = [block.fd for block in blocks if block.fd is not None]
        self._outboxes[rank].put(Parcel(packed(message), [*fds, *message.descriptors], 1))

    def _deliver(self, rank: int, message: Any) -> None:
        if self._take is None:
            super()._deliver(rank, message)
        else:
            self._take(rank, message)

    def event(self, timeout: float) -> tuple[int, Any] | None:
        """Waits for the next event.

        Args:
            timeout: seconds.

        Returns:
            The rank and a message, a `Delivery`, `WorkerGone`, `Joined` or `NotStarted`. None if
            nothing has happened for `timeout` seconds, or if another thread has posted `Woken`.

        Raises:
            BaseException: What a thread of the pool has raised.
        """
        self._trim_logs()
        while True:
            try:
                rank, found = self._inbox.get(timeout=timeout)
            except queue.Empty:
                self._end_channels_of_dead_workers()
                return None
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, messages.Woken):
                return None
            if isinstance(found, (Joined, NotStarted)):
                self._starting.pop(rank).join(END_SECONDS)
                if isinstance(found, Joined) and not self._readers[rank].is_alive():
                    self.replace(rank)  # it has ended already: its `Gone` was dropped below
                    continue
            elif isinstance(found, Gone):
                if found.worker is not self.workers[rank] or rank in self._starting:
                    continue  # it was replaced
                found = WorkerGone(found.worker)
            return rank, found

    def _end_channels_of_dead_workers(self) -> None:
        """Lets their readers come to the end, though a fork of this process may hold the channel.

        A reader first reports what the worker had sent, so that no result is lost or counted twice.
        """
        for worker in self.workers:
            if worker.rank not in self._starting and worker.process.poll() is not None:
                worker.channel.shut_down()

    def has_worked(self, rank: int) -> bool:
        """Returns True if a worker has had an item, in this call or an earlier one."""
        return rank in self._used

    def memory_of(self, rank: int) -> int:
        """Returns the bytes of memory that a worker does not share with this process."""
        try:
            found = psutil.Process(self.workers[rank].process.pid).memory_info()
        except psutil.NoSuchProcess:
            return 0  # its end is the next event
        return int(found.rss - getattr(found, "shared", 0))

    def growth_of(self, rank: int) -> int:
        """Returns by how many bytes a worker's memory has grown since the first call of this."""
        now = self.memory_of(rank)
        return now - self._first_memory.setdefault(rank, now)

    # ---------------------------------------------------------------------------- replacing
    def replace(self, rank: int) -> None:
        """Ends a worker if it runs, and starts another on its cores.

        `Joined` tells when it is ready, `NotStarted` that there is none.

        Args:
            rank: of a worker that has no item.
        """
        self._used.discard(rank)
        self._first_memory.pop(rank, None)
        old = self.workers[rank]

        def start_another() -> None:
            self._end_worker(old)
            started(lambda: self._start(rank), lambda: self._ending)

        self._join_later(rank, start_another)

    def add(self, placement: topology.Placement) -> None:
        """Starts one more worker; `Joined` tells when it is ready, `NotStarted` that it is not.

        Args:
            placement: its rank is the number of workers.

        Raises:
            WorkerDied: It could not be forked.
        """
        with self._forking:  # `kill` reads what this changes
            if self._ending:
                return
            state = ProcessState.capture(early=True)
            new = self._crew.add(placement)
            self.size += 1
            self._join_later(new.rank, lambda: self._make_ready(new, state))

    def _join_later(self, rank: int, start: Callable[[], None]) -> None:
        """Starts a worker in a thread, which announces it."""

        def announce() -> None:
            try:
                start()
                self._inbox.put((rank, Joined()))
            except WorkerDied as error:
                self._inbox.put((rank, NotStarted(error)))
            except BaseException as error:  # raised in the thread that waits for events
                self._inbox.put((rank, error))

        thread = threading.Thread(target=announce, name=f"nanotf-start-{rank}", daemon=True)
        self._starting[rank] = thread
        thread.start()

    def _start(self, rank: int) -> None:
        with self._forking:
            if self._ending:
                return
            state = ProcessState.capture(early=True)
            new = self._crew.replace(rank)
        self._make_ready(new, state)

    def _make_ready(self, new: Worker, state: ProcessState) -> None:
        try:
            self._prepare([new], state)
        except BaseException:
            new.process.kill()
            new.wait_killed()
            new.close()
            raise
        self._start_threads_of(new)

    def _end_worker(self, worker: Worker) -> None:
        if worker.process.poll() is None:
            worker.process.kill()  # it has no item, and nothing worth saving
        worker.wait_killed()
        worker.channel.shut_down()
        self._outboxes[worker.rank].end()
        self._readers[worker.rank].join(END_SECONDS)
        worker.close()

    def settle(self) -> None:
        """Waits for the workers that start; the next call then finds all of them."""
        for thread in self._starting.values():
            thread.join(handshake.START_SECONDS)
        self._starting.clear()
        while not self._inbox.empty():  # late events would reach the next call
            self._inbox.get()

    def kill(self) -> None:
        """Kills the workers at once."""
        with interrupts.held_back():
            with self._forking:
                self._ending = True
            # A thread that starts a worker ends once that worker has ended.
            while any(thread.is_alive() for thread in self._starting.values()):
                self.kill_workers()
                time.sleep(_POLL_SECONDS)
            super().kill()
