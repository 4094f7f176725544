"""Arrays from one process to another, by rank and tag, in shared memory.

    rank 0                                        rank 1
      send(1, "activations", [array])
        one copy, into a block       ------>        a thread puts it into a box by (source, tag)
                                                    receive(0, "activations")  maps the block

A send never waits for the receiver: the thread of the sender's mailbox sends later what the
receiver's queue has no room for. So processes that send to each other at once cannot block each
other, and one thread can run a pipeline's schedule.

Every process has one datagram socket, its inbox, whose sending end all others and their
supervisor inherit (`mailbox_owner`). The supervisor tells the ranks of a rank's end, and of a
deadlock that it has found in their reports (`waits`). Nothing else ends a receive: how long a
rank may compute, nobody knows.
"""

from __future__ import annotations

import collections
import copy
import itertools
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanotf.errors import CollectiveError, InvalidArgumentError, NanoError
from nanotf.machine import threads
from nanotf.sagemaker.smp.mailboxes.letters import (
    DATAGRAM_BYTES,
    AllFailed,
    Array,
    Introduction,
    Letter,
    LetterBlock,
    MailboxWait,
    RankEnded,
    WaitReport,
    Wake,
    pack,
    unpack,
)
from nanotf.sagemaker.smp.mailboxes.outboxes import InboxSender

REPORT_SECONDS = 1.0  # between two reports of a rank that waits
_FULL_SECONDS = 0.005  # until the next try, where the system has no room for a datagram
_POLL_SECONDS = 5.0  # a wait without a limit would not notice Ctrl-C on every system
_FLUSH_SECONDS = 10.0  # for pending datagrams when the mailbox closes
_NEWS_SECONDS = 10.0  # for the supervisor to tell how a rank has ended


@dataclass(frozen=True)
class MailboxSpec:
    """The ends that a process needs for its mailbox. `mailbox_owner` makes it."""

    rank: int
    size: int  # number of ranks
    inbox: int  # the descriptor of the socket to read
    outboxes: tuple[int, ...]  # of the sockets to write, by rank; the last is the supervisor's

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors, for `pass_fds`."""
        return (self.inbox, *self.outboxes)


class Mailbox:
    """A process's mailbox. Any thread may send and receive.

    Args:
        spec: its descriptors are owned from now on.

    Attributes:
        rank, size: this process's rank, and the number of ranks.
    """

    def __init__(self, spec: MailboxSpec) -> None:
        self.rank, self.size = spec.rank, spec.size
        for fd in spec.fds:
            os.set_inheritable(fd, False)  # else programs of the script would hold them open
        self._inbox = socket.socket(fileno=spec.inbox)
        *outboxes, self._supervisor = [InboxSender(fd) for fd in spec.outboxes]
        self._outboxes = outboxes
        self._numbers = itertools.count()  # of `MailboxWait`s; `next` is atomic and needs no lock
        self._parent = os.getppid()  # changes when the process that started the ranks ends
        self._changed = threading.Condition()
        # Guarded by `_changed`. The thread fills boxes, `receive` empties them.
        self._boxes: dict[tuple[int, str], collections.deque[list[Array]]] = {}
        self._waits: dict[int, MailboxWait] = {}
        self._received = [0] * self.size
        self._ended: set[int] = set()
        self._failure: NanoError | None = None
        self._raised: NanoError | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"nanotf-mailbox-{self.rank}", daemon=True
        )
        self._thread.start()

    def introduce(self, partition: int, about: str) -> None:
        """Tells the supervisor this rank's part of the work. All ranks fail if they do not fit.

        Args:
            partition: the part of a model that this rank has, for messages.
            about: such as the configuration; the n-th call says the same on all ranks.
        """
        introduction = Introduction(self.rank, partition, about)
        self._post(self._supervisor, pickle.dumps(introduction), None)

    # ------------------------------------------------------------------------- for callers
    def send(self, destination: int, tag: str, arrays: Sequence[Array]) -> None:
        """Sends arrays. Does not wait for the receiver.

        Args:
            destination: a rank; it may be this one.
            tag: letters of one source and tag arrive in order.
            arrays: of any dtype but `object`. They are copied before the call returns.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: There is no such rank, or an array
                holds Python objects.
            CollectiveError: The receiver has ended, or ranks wait for each other.
            WorkerDied: A rank has died.
        """
        self.send_to_all([destination], tag, arrays)

    def send_to_all(self, destinations: Sequence[int], tag: str, arrays: Sequence[Array]) -> None:
        """Sends the same arrays to several ranks, copied once; their mappings are shared.

        The receivers must not write to the arrays. Otherwise as `send`.
        """
        for destination in destinations:
            self._check_rank("destination", destination)
        with self._changed:
            for destination in destinations:
                self._check_alive(destination, f"send(destination={destination}, tag={tag!r})")
        data, block = pack(self.rank, tag, arrays)  # without the lock: the copy may take long
        for destination in destinations:
            try:
                self._post(self._outboxes[destination], data, block)
            except OSError as error:
                raise self._news_of(destination, tag) from error

    def receive(self, source: int, tag: str, what: str | None = None) -> list[Array]:
        """Waits for arrays.

        Args:
            source: the sender's rank; it may be this one.
            what: the call in the text of errors; None for "receive(...)".

        Returns:
            Views of memory that lives as long as they do.

        Raises:
            InvalidArgumentError: There is no such rank.
            CollectiveError: The arrays cannot come: the sender has ended, or ranks wait for each
                other.
            WorkerDied: A rank has died.
        """
        self._check_rank("source", source)
        what = what or f"receive(source={source}, tag={tag!r})"
        key = (source, tag)
        wait = MailboxWait(next(self._numbers), source, what)
        with self._changed:
            try:
                # Looks for the letter first: its sender may have ended after sending it.
                while not (box := self._boxes.get(key)):
                    self._check_alive(source, what)
                    self._waits[wait.number] = wait  # the thread reports it to the supervisor
                    self._changed.wait(_POLL_SECONDS)
            finally:
                self._waits.pop(wait.number, None)
            self._check_failure()  # once all fail, every call raises, even with its letter here
            arrays = box.popleft()
            if not box:
                del self._boxes[key]  # `_check_alive` names those left as letters that nobody took
        return arrays

    def close(self) -> None:
        """Sends what is pending, and leaves. May be called twice."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True  # receives that wait see it within `_POLL_SECONDS`
        self._wake()
        self._thread.join(_FLUSH_SECONDS)
        for outbox in (*self._outboxes, self._supervisor):
            outbox.close()
        self._inbox.close()

    @property
    def error(self) -> NanoError | None:
        """The last error of a send or receive, of any thread.

        TensorFlow carries only an error's text out of a `tf.function`.
        """
        return self._raised

    # ------------------------------------------------------------------------- failures
    def _check_rank(self, name: str, value: Any) -> None:
        if not isinstance(value, int) or not 0 <= value < self.size:
            raise InvalidArgumentError(
                f"{name} must be a rank, 0 to {self.size - 1}. Received: {name}={value!r}."
            )

    def _check_alive(self, other: int, what: str) -> None:
        """Raises if there is nothing to wait for. The caller holds `_changed`."""
        self._check_failure()
        if self._is_closing:
            raise CollectiveError(f"rank {self.rank} has closed its mailbox. Received: {what}.")
        if other in self._ended:
            there = [tag for source, tag in self._boxes if source == other]
            hint = f"; it has sent letters with the tags {there}, which nobody took" * bool(there)
            self._raised = CollectiveError(
                f"Sends and receives must match. Received: {what} on rank {self.rank}, but rank "
                f"{other} has ended{hint}. Check that both ranks take the same path."
            )
            raise self._raised

    def _check_failure(self) -> None:
        if self._failure is not None:
            # A copy: each thread that raises it adds its own traceback.
            self._raised = copy.copy(self._failure)
            raise self._raised

    def _news_of(self, rank: int, tag: str) -> NanoError:
        """Returns the error for a rank that has ended; the supervisor tells more in a moment."""
        deadline = time.monotonic() + _NEWS_SECONDS
        with self._changed:
            while time.monotonic() < deadline:
                try:
                    self._check_alive(rank, f"send(destination={rank}, tag={tag!r})")
                except NanoError as error:
                    return error
                self._changed.wait(_POLL_SECONDS)
        return CollectiveError(f"The mailbox of rank {rank} is closed. Received: tag={tag!r}.")

    def _fail(self, error: NanoError) -> None:
        with self._changed:
            self._failure = self._failure or error  # later ones may follow from the first
            self._changed.notify_all()

    # ------------------------------------------------------------------------- the thread
    def _post(self, outbox: InboxSender, data: bytes, block: Any) -> None:
        if not outbox.send(data, block):
            self._wake()  # else the thread waits on without this outbox

    def _wake(self) -> None:
        try:
            # Not `send`: an inbox without room for it holds datagrams, which wake the thread.
            self._outboxes[self.rank].offer(pickle.dumps(Wake()))
        except OSError:
            pass  # the thread has ended

    def _run(self) -> None:
        reported = time.monotonic()
        try:
            with threads.as_service():
                # After `close`, it still sends what is pending, unless all has failed.
                while not self._is_closing or (self._pending() and self._failure is None):
                    self._wait_for_io(reported + REPORT_SECONDS)
                    if time.monotonic() - reported >= REPORT_SECONDS:
                        reported = time.monotonic()
                        self._report()
        # No letter arrives without this thread, so every receive must raise.
        except Exception as error:
            self._fail(CollectiveError(f"The mailbox of rank {self.rank} has failed: {error!r}."))

    def _pending(self) -> list[InboxSender]:
        return [o for o in (*self._outboxes, self._supervisor) if o.has_pending]

    def _wait_for_io(self, until: float) -> None:
        """Waits for a datagram, or room for one, or a moment; reads and sends what it can."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._inbox, select.POLLIN)
        pending = self._pending()
        for outbox in pending:
            poll.register(outbox, select.POLLOUT)
        seconds = max(0.0, until - time.monotonic())  # `poll` takes a negative one for no limit
        ready = {fd for fd, _ in poll.poll(1000 * seconds)}
        if self._inbox.fileno() in ready:
            self._read()
        for outbox in pending:
            if outbox.fileno() not in ready:
                continue
            try:
                if not outbox.flush():
                    # `poll` tells of room in the buffer, but not of too many descriptors under way.
                    time.sleep(_FULL_SECONDS)
            except OSError:
                pass  # it has ended; whoever waits for it learns that from the supervisor

    def _read(self) -> None:
        try:
            data, ancillary, flags, _ = self._inbox.recvmsg(
                DATAGRAM_BYTES, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        fds = [struct.unpack("i", content[:4])[0] for _, _, content in ancillary]
        if flags & socket.MSG_CTRUNC and not fds:
            raise OSError("this process has no file descriptors left (`ulimit -n`)")
        message = pickle.loads(data)
        if isinstance(message, (Letter, LetterBlock)):
            letter, arrays = unpack(message, fds[0] if fds else None)
            with self._changed:
                self._received[letter.source] += 1  # unequal to the sender's: some are under way
                box = self._boxes.setdefault((letter.source, letter.tag), collections.deque())
                box.append(arrays)
                self._changed.notify_all()
        elif isinstance(message, AllFailed):
            self._fail(message.error)
        elif isinstance(message, RankEnded):
            self._outboxes[message.rank].abandon()  # `close` would wait for room there in vain
            with self._changed:
                self._ended.add(message.rank)
                self._changed.notify_all()

    def _report(self) -> None:
        """Tells the supervisor what this rank waits for."""
        if os.getppid() != self._parent:
            self._fail(CollectiveError("The process that started the ranks has ended."))
        with self._changed:
            waits = tuple(sorted(self._waits.values(), key=lambda wait: wait.number))
            received = tuple(self._received)
        if waits:  # silence says that this rank waits for nobody
            sent = tuple(outbox.sent for outbox in self._outboxes)
            is_busy = threads.others_run()
            report = WaitReport(self.rank, waits, sent, received, time.process_time(), is_busy)
            try:
                self._supervisor.offer(pickle.dumps(report))
            except OSError as error:
                self._fail(CollectiveError(f"The supervisor of the ranks has ended ({error})."))
