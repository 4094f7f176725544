"""The supervisor's side of mailboxes: their ends, the ranks' reports, news of ranks that end."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
from collections.abc import Iterator

from nanotf.console import logger
from nanotf.errors import CollectiveError, NanoError
from nanotf.machine import threads
from nanotf.sagemaker.smp.mailboxes.letters import (
    DATAGRAM_BYTES,
    AllFailed,
    Introduction,
    RankEnded,
    WaitReport,
)
from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox, MailboxSpec
from nanotf.sagemaker.smp.mailboxes.outboxes import InboxSender
from nanotf.sagemaker.smp.mailboxes.waits import RankReports, describe
from nanotf.wire.memory_files import above_standard
from nanotf.wire.own_threads import OwnThread


class MailboxOwner:
    """The mailboxes of some ranks, in the process that starts them.

    Args:
        size: number of ranks.
        patience: seconds after which a rank that still waits is named in a warning.

    Attributes:
        size: number of ranks.
        partitions: by rank, the partition that it has introduced itself with.
    """

    def __init__(self, size: int, patience: float = 600.0) -> None:
        self.size = size
        self._patience = patience
        self._introductions: dict[int, list[str]] = {}  # by rank
        self.partitions: dict[int, int] = {}
        self._reading = threading.Lock()
        self._watch = RankReports()  # guarded by `_reading`, like the above
        self._failing = threading.Lock()  # another one: `read` calls `fail` with `_reading` held
        self._failure: NanoError | None = None  # guarded by `_failing`, set once
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(size + 1)]
        *self._inboxes, own = [above_standard(reader.detach()) for reader, _ in ends]
        self._inbox = socket.socket(fileno=own)
        self._outboxes = [InboxSender(above_standard(writer.detach())) for _, writer in ends]

    def spec(self, rank: int) -> MailboxSpec:
        """Returns what a child process needs that inherits these descriptors (`pass_fds`)."""
        outboxes = tuple(outbox.fileno() for outbox in self._outboxes)
        return MailboxSpec(rank, self.size, self._inboxes[rank], outboxes)

    def release(self, rank: int) -> None:
        """Closes this process's copy of a rank's inbox, after its process has started.

        While a copy is open, sends to a rank that has ended do not fail.
        """
        # `close` calls it again, when another file may have the number.
        fd, self._inboxes[rank] = self._inboxes[rank], -1
        if fd >= 0:
            os.close(fd)

    @property
    def failure(self) -> NanoError | None:
        """The error that all ranks raise, if there is one."""
        return self._failure

    def fileno(self) -> int:
        """Returns a descriptor that can be read when `read` has something to do."""
        return self._inbox.fileno()

    def read(self) -> None:
        """Reads what the ranks report. If some wait for each other, all ranks fail.

        Any thread may call it.
        """
        with self._reading:
            while True:
                try:
                    message = pickle.loads(self._inbox.recv(DATAGRAM_BYTES, socket.MSG_DONTWAIT))
                except BlockingIOError:
                    break
                if isinstance(message, Introduction):
                    self._meet(message)
                elif isinstance(message, WaitReport):
                    self._watch.note(message)
            for text in self._watch.long_waits(self._patience):
                logger.warning("%s", text)
            stuck = self._watch.stuck()
            if stuck and self._failure is None:
                self.fail(describe(stuck))

    def _meet(self, new: Introduction) -> None:
        self.partitions[new.rank] = new.partition
        own = self._introductions.setdefault(new.rank, [])
        own.append(new.about)
        # Only the same call is compared: some ranks may be one `smp.init` ahead.
        for rank, abouts in self._introductions.items():
            if len(abouts) >= len(own) and abouts[len(own) - 1] != new.about:
                other = abouts[len(own) - 1]
                self.fail(
                    CollectiveError(
                        f"All ranks must have the same configuration. Received: {other} on rank "
                        f"{rank}, {new.about} on rank {new.rank}."
                    )
                )

    def tell_ended(self, rank: int) -> None:
        """Tells the ranks that one has ended as it should. Who waits for it raises."""
        self._tell(pickle.dumps(RankEnded(rank)))

    def fail(self, error: NanoError) -> None:
        """Makes all present and later calls of all ranks raise an error; the first one counts."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = error
        self._tell(pickle.dumps(AllFailed(error)))

    def flush(self) -> bool:
        """Sends what was pending. Returns True if nothing is left; call it again otherwise."""
        done = True
        for outbox in self._outboxes[: self.size]:
            with contextlib.suppress(OSError):  # it has ended
                done = outbox.flush() and done
        return done

    def close(self) -> None:
        """Closes all ends."""
        for rank in range(self.size):
            self.release(rank)
        for outbox in self._outboxes:
            outbox.close()
        self._inbox.close()

    def _tell(self, data: bytes) -> None:
        for outbox in self._outboxes[: self.size]:  # the last one leads to this process
            with contextlib.suppress(OSError):  # it has ended
                outbox.send(data)


@contextlib.contextmanager
def supervised(owner: MailboxOwner) -> Iterator[None]:
    """Supervises mailboxes from a thread, for a process that has something else to do."""
    reader, writer = os.pipe()

    def run() -> None:
        poll = select.poll()
        poll.register(owner, select.POLLIN)
        poll.register(reader, select.POLLIN)
        with threads.as_service():
            # At least every 200 ms: news may be pending, and waits grow long without any report.
            while reader not in {fd for fd, _ in poll.poll(200)}:
                owner.read()
                owner.flush()

    thread = OwnThread(target=run, name="nanotf-mailboxes", daemon=True)
    try:
        thread.start()
        yield
    finally:
        os.close(writer)  # the thread's `poll` sees the end of the pipe
        thread.join()
        os.close(reader)  # after `join`: another file may get the number at once


@contextlib.contextmanager
def mailboxes(size: int) -> Iterator[list[Mailbox]]:
    """Makes the mailboxes of several ranks in this process, for threads: for tests.

    Args:
        size: number of ranks.
    """
    owner = MailboxOwner(size)
    made = []
    try:
        for rank in range(size):
            spec = owner.spec(rank)
            copies = tuple(os.dup(fd) for fd in spec.fds)  # each mailbox closes its own
            made.append(Mailbox(MailboxSpec(rank, size, copies[0], copies[1:])))
            owner.release(rank)
        with supervised(owner):
            yield made
            for mailbox in made:  # while the owner still reads what they send
                mailbox.close()
    finally:
        for mailbox in made:
            mailbox.close()
        owner.close()
