"""A pool starts its workers, talks to them and stops them. `supervision` notices hanging workers.

    parent process                                   worker process (one per rank)
      Pool(plan, transport)                            nanotf.worker, forked or started
        socketpair, secret key               ---->     pins itself, before TensorFlow runs anything
        one thread per worker reads its channel        one thread reads the channel
        and puts its messages into `Pool._inbox`       and ends the process when it closes
        another writes to it, see `outbox`

The channel is a Unix socket pair that only the two processes hold. It has no name that
another process could open, or that could stay behind. A worker's output goes to an anonymous
file. If the worker dies, the error quotes the file's end. When the parent exits, for any
reason, the kernel closes its end, and each worker exits.

A pool belongs to the thread that runs a call on it, see `warm`. That thread waits only for the
inbox, so that it notices workers that make no progress. The reader threads touch only the
inbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import connection
from typing import Any

from nanotf import collectives
from nanotf.compat.process_state import ProcessState
from nanotf.console import logger
from nanotf.errors import NanoError, WorkerError
from nanotf.pool import backends, handshake, interrupts, stalls
from nanotf.pool.handles import Worker
from nanotf.pool.handshake import greet
from nanotf.pool.hosts.remote import taken_over
from nanotf.pool.outbox import END_SECONDS, Outbox, Parcel
from nanotf.pool.plans import AnyPlan
from nanotf.pool.starts import SetupError, announced
from nanotf.pool.supervision import PoolSupervisor, not_finished
from nanotf.pool.transports import READS
from nanotf.wire import messages
from nanotf.wire.blocks import Block
from nanotf.wire.channel import KEY_NBYTES, NO_DESCRIPTORS, ChannelClosed, packed
from nanotf.wire.own_threads import OwnThread

STOP_SECONDS = 2.0  # for workers to exit after `Stop`, before they are killed
TRIM_SECONDS = 60.0  # how often the parent checks whether a worker's log has become long


@dataclasses.dataclass(frozen=True)
class Gone:
    """An item of the inbox: the worker's channel has closed."""

    worker: Worker


@dataclasses.dataclass(frozen=True)
class Delivery:
    """An item of the inbox: a message, and the shared block whose descriptor followed it."""

    message: Any  # `messages.Outputs` or `messages.Returned`
    block: Block


class Pool:
    """N live workers.

    Args:
        transport: one of `transports.TRANSPORTS`; for an `ItemPool`, `NO_TRANSPORT` or `READS`.

    Raises:
        WorkerDied: A worker ended before it was ready.
        WorkerError: A worker could not set up its strategy.
        NanoError: This process has no file descriptors left, or NANOTF_STALL_SECONDS is wrong.
    """

    def __init__(self, plan: AnyPlan, transport: str) -> None:
        self.plan = plan
        self.transport = transport
        self.size = plan.size
        self.owner = os.getpid()
        self.usable = True  # False while a call runs: its late answers would reach the next one
        self._closed = False
        self._is_freed = False  # or a thread frees what it has used, after a second Ctrl-C
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._readers: dict[int, threading.Thread] = {}  # by rank
        self._outboxes: dict[int, Outbox] = {}  # likewise
        # All workers get all messages in the same sequence; bridges to other machines rely on it.
        self._send_lock = threading.Lock()
        self._orders = 0
        self.stall_seconds = stalls.stall_seconds()
        self._trimmed = time.monotonic()  # the workers' logs
        self._checked = time.monotonic()  # the last call of `check_progress`
        self._state_block: Block | None = None
        self.group: collectives.GroupOwner | None = None
        self._key = secrets.token_bytes(KEY_NBYTES)
        with contextlib.ExitStack() as stack:
            with announced(self.size, "reader" if transport == READS else "worker"):
                state = ProcessState.capture(early=True)  # what the workers start with
                self._crew = backends.crew_of(plan, transport, self._key)
                stack.push(self._kill_after_error)
                self.supervisor = PoolSupervisor(self.workers, self.stall_seconds, transport)
                self._begin(state)
            # No earlier: until here, this thread reads the channels.
            for worker in self.workers:
                self._start_threads_of(worker)

    def _begin(self, state: ProcessState) -> None:
        """Starts the workers, and waits until they are ready."""
        with explaining_few_descriptors(self.size):
            if self.transport == "shm":  # before the workers, so that its limits raise at once
                here = self._crew.here
                self.group = collectives.create_group(
                    here.size, nodes=here.like_nodes(), deadline=self._crew.deadline
                )
            self._crew.start()
            self._prepare(self.workers, state)

    def _kill_after_error(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Kills the workers of a pool that could not be made, or whose end was interrupted."""
        if error is not None:
            with interrupts.held_back(error):
                self.kill()

    def _start_threads_of(self, worker: Worker) -> None:
        """Starts the threads that read a worker's channel and write to it."""
        rank = worker.rank
        reader = OwnThread(target=self._read, args=(worker,), name=f"nanotf-{rank}", daemon=True)
        outbox = Outbox(
            worker.channel, f"nanotf-to-{rank}", lambda error: self._inbox.put((rank, error))
        )
        self._readers[rank], self._outboxes[rank] = reader, outbox  # `kill` ends them from now on
        reader.start()
        outbox.begin()

    @property
    def workers(self) -> Sequence[Worker]:
        """Returns the workers that were started, by rank."""
        return self._crew.workers

    def share_memory(self) -> bool:
        """Returns True if all workers map this process's shared blocks."""
        return all(worker.shares_memory for worker in self.workers)

    def outgoing(self, state: ProcessState) -> ProcessState:
        """Returns the part of this process's state that its workers may get."""
        if self.share_memory():
            return state
        return state.with_environ(taken_over(state.values["environ"]))

    def state_block(self, nbytes: int) -> Block:
        """Returns the memory for a call's state, whose content is undefined.

        All calls use the same block while it is large enough: to allocate pages takes several times
        as long as to write to them.
        """
        if self._state_block is None or self._state_block.nbytes < nbytes:
            self._state_block = Block(nbytes)
        return self._state_block

    # ------------------------------------------------------------------------- starting
    def _prepare(self, workers: Sequence[Worker], state: ProcessState) -> None:
        """Waits until workers have started, and sets them up.

        Args:
            state: this process's when they were started.
        """
        deadline = time.monotonic() + handshake.START_SECONDS
        for worker in workers:
            greet(worker, self._key, deadline)
        self._set_up(workers, state, deadline)

    def _expect(
        self, workers: Sequence[Worker], kind: type, doing: str, deadline: float
    ) -> list[Any]:
        """Waits until workers have sent a message of one kind. Returns the messages in order.

        The first failure raises first, since the other workers may be waiting for the worker that
        failed.
        """
        found: dict[int, Any] = {}
        while len(found) < len(workers):
            missing = [worker for worker in workers if worker.rank not in found]
            channels: list[Any] = [worker.channel for worker in missing]
            ready: list[Any] = connection.wait(channels, timeout=0.2)
            for worker in missing:
                if worker.channel in ready:
                    found[worker.rank] = self._first_message(worker, kind, doing)
                elif worker.process.poll() is not None:  # a fork may hold its channel open
                    raise worker.died(doing)
            if time.monotonic() > deadline:
                raise not_finished(missing, doing, handshake.START_SECONDS)
        return [found[worker.rank] for worker in workers]

    def _first_message(self, worker: Worker, kind: type, doing: str) -> Any:
        try:
            message = worker.channel.receive()
        except ChannelClosed as error:
            raise worker.died(doing) from error
        except BlockingIOError as error:  # the limit that `greet` has set
            raise not_finished([worker], doing, handshake.START_SECONDS) from error
        if isinstance(message, messages.SetupFailed):
            text = f"{worker.title} {worker.rank} could not set up its strategy: {message.summary}"
            failure = worker.error(SetupError, text, remote_traceback=message.traceback)
            failure.retry = message.retry
            raise failure
        assert isinstance(message, kind), message
        return message

    def _set_up(self, workers: Sequence[Worker], state: ProcessState, deadline: float) -> None:
        hellos = self._expect(workers, messages.Hello, "starting", deadline)
        for worker, hello in zip(workers, hellos, strict=True):
            for warning in hello.warnings:
                logger.warning("%s %d: %s", worker.title, worker.rank, warning)
        setup = messages.Setup(self.outgoing(state), self.size, self.stall_seconds)
        if self.transport == "grpc":
            cluster = tuple(f"127.0.0.1:{hello.port}" for hello in hellos)
            setup = dataclasses.replace(setup, cluster=cluster)
            _warn_of_listeners(cluster)
        elif self.group is not None:
            setup = dataclasses.replace(setup, group=self.group.spec, hosts=self._crew.hosts)
        for worker in workers:
            try:
                self._send_setup(worker, setup)
            except BlockingIOError as error:
                raise not_finished([worker], "starting", handshake.START_SECONDS) from error
        self._expect(workers, messages.Ready, "importing TensorFlow", deadline)
        for worker in workers:
            worker.channel.limit(0)  # a call may take any time
            worker.is_ready()

    def _send_setup(self, worker: Worker, setup: messages.Setup) -> None:
        if self.group is None or not worker.shares_memory:
            worker.channel.send(setup)  # another host has its own group
            return
        # Closed here at once: other hosts must notice when the worker has ended.
        connections = self._crew.take_connections(worker.rank)
        try:
            setup = dataclasses.replace(setup, connections=len(connections))
            worker.channel.send(setup, [self.group.fd, *connections])
        finally:
            for fd in connections:
                os.close(fd)

    # ----------------------------------------------------------------------- talking
    def _read(self, worker: Worker) -> None:
        try:
            while True:
                self._deliver(worker.rank, _next_of(worker))
        except ChannelClosed:
            self._inbox.put((worker.rank, Gone(worker)))
        except BaseException as error:  # no memory or descriptor for a message: the call fails
            self._inbox.put((worker.rank, error))

    def _deliver(self, rank: int, message: Any) -> None:
        """Takes a worker's message, in the thread that reads the worker's channel."""
        self._inbox.put((rank, message))

    def send(self, message: messages.Message, blocks: Sequence[Block] = ()) -> None:
        """Sends a message, and the descriptors of shared blocks, to all workers.

        Does not wait for the workers to read: `receive` and `check_progress` notice a worker that
        has exited or does not read.

        Raises:
            OSError: This process has no file descriptors left.
        """
        fds = [block.fd for block in blocks if block.fd is not None]
        parcel = Parcel(packed(message), fds, len(self._outboxes))
        with self._send_lock:
            for outbox in self._outboxes.values():
                outbox.put(parcel)

    def receive(self, timeout: float | None = None) -> tuple[int, Any]:
        """Waits for the next message of any worker.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            A tuple of the rank and the message, which is a `Delivery` if a block came with it.

        Raises:
            WorkerDied: A worker has exited. The pool is no longer usable.
            NanoError: All workers have exited, since `close` was called.
            queue.Empty: There is no message, and the timeout has passed since the last message or
                the last call of `check_progress`.
        """
        self._trim_logs()
        looked_long_ago = timeout is not None and time.monotonic() - self._checked > timeout
        if looked_long_ago and self._inbox.empty():
            raise queue.Empty  # with many workers, frequent messages would delay the check
        rank, message = self._inbox.get(timeout=timeout)
        if isinstance(message, Gone):
            raise self._lost(self.workers[rank])
        self.supervisor.heard(rank, message)
        return rank, message

    def _lost(self, worker: Worker) -> NanoError:
        """Returns the error for a worker that has ended in the middle of a call."""
        self.usable = False
        if self._closed:
            return NanoError(
                "The workers must stay until the call that uses them has returned. Received: "
                "nanotf.shutdown() during that call, in a callback or a signal handler. Call it "
                "later."
            )
        died: WorkerError = worker.died("a call ran")
        return died

    def _trim_logs(self) -> None:
        now = time.monotonic()
        if now - self._trimmed > TRIM_SECONDS:
            self._trimmed = now
            for worker in self.workers:
                if worker.process.poll() is None:  # else its log may be closed
                    worker.trim_log()

    def check_progress(
        self, present: Collection[int], reading: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Checks that all workers run, and that none keeps the others waiting for too long.

        Args:
            present, reading: as in `PoolSupervisor.check_progress`.

        Raises:
            WorkerStuck: A worker keeps the others waiting for too long.
            WorkerDied: A worker has ended, and a fork of this process holds its channel open.
        """
        self._checked = time.monotonic()
        for worker in self.workers:
            if worker.process.poll() is not None:
                raise self._lost(worker)
        self.supervisor.check_progress(present, reading)

    def post(self, message: messages.DataFailed | messages.Woken) -> None:
        """Puts a message of the parent's own threads into the inbox, with rank -1.

        Any thread may call it.
        """
        self._inbox.put((-1, message))

    def next_order(self) -> int:
        """Returns the number of a new order, with which supervision begins anew."""
        self._orders += 1
        self._checked = time.monotonic()
        self.supervisor.begin_order()
        return self._orders

    # ----------------------------------------------------------------------- ending
    def is_alive(self) -> bool:
        """Returns True if all workers run and none has a call."""
        return self.usable and all(w.process.poll() is None for w in self.workers)

    def close(self) -> None:
        """Asks the workers to exit, and kills those that do not."""
        if self.owner != os.getpid():  # after a fork, the workers belong to the parent
            return
        self.usable, self._closed = False, True
        if self._is_freed:
            return
        with contextlib.ExitStack() as stack:
            stack.push(self._kill_after_error)
            self.send(messages.Stop())
            deadline = time.monotonic() + STOP_SECONDS
            for worker in self.workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills the workers at once, and frees what they have used."""
        if self.owner != os.getpid():
            return
        with interrupts.held_back():
            self.kill_workers()
            if not self._is_freed:
                self._is_freed = True
                interrupts.finish(self._free, "nanotf-end")

    def kill_workers(self) -> None:
        """Kills the workers at once, and does not wait for their end."""
        self.usable = False
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()

    def _free(self) -> None:
        for worker in self.workers:
            worker.wait_killed()
            worker.channel.shut_down()  # a fork may hold the other end
        for outbox in self._outboxes.values():
            outbox.end()
        for reader in self._readers.values():
            reader.join(END_SECONDS)
        for worker in self.workers:  # no earlier: the threads use the descriptors
            worker.close()
        self._crew.close()
        self._state_block = None  # a kept exception may keep this object
        if self.group is not None:
            self.group.close()


@contextlib.contextmanager
def explaining_few_descriptors(size: int) -> Iterator[None]:
    """Raises a `NanoError` with the remedy if this process has no file descriptors left."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        raise NanoError(
            f"Every worker needs a few file descriptors of this process. Received: {size} workers, "
            f"and {error.strerror!r}. Raise the limit (`ulimit -n`), or close files."
        ) from error


def _next_of(worker: Worker) -> Any:
    """Waits for a worker's next message. In a function, so that no local keeps the last block."""
    message = worker.channel.receive()
    if isinstance(message, (messages.Outputs, messages.Returned)):
        block = Block(message.nbytes, worker.channel.receive_fds(1)[0])
        return Delivery(message, block)
    return message


def _warn_of_listeners(cluster: Sequence[str]) -> None:
    """Warns that TensorFlow's server always binds all interfaces (0.0.0.0, in its sources)."""
    ports = [address.rpartition(":")[2] for address in cluster]
    logger.warning(
        'transport="grpc": TensorFlow\'s server in each worker listens on all network interfaces, '
        "TCP port%s %s, and accepts every connection. Anyone who can reach it can run code as you. "
        'Use it only on trusted networks or behind a firewall; transport="shm" opens no port.',
        "s" if len(ports) > 1 else "",
        ", ".join(ports),
    )
