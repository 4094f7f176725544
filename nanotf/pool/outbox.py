"""The parent's outgoing messages to one worker: queued at once, written when the worker reads.

A worker may stop reading, because a signal has stopped it or the user's code holds the GIL. A
blocking write would then keep the parent from supervising its workers. So one thread per worker
writes, and senders do not wait. The thread waits as long as the worker lives:
`Pool.check_progress` notices a stopped worker, and `Pool.kill` ends the wait. A small message that
the socket takes at once needs no thread: to wake one takes longer than to write, much longer while
the user's code holds the GIL here.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.own_threads import OwnThread

END_SECONDS = 1.0  # limit for a thread to end once its channel is shut down; it takes a millisecond


class Parcel:
    """A message on its way to several workers, with its own file descriptors.

    Args:
        data: the message, see `channel.packed`.
        fds: sent with it; the parcel duplicates them.
        readers: number of workers that get it.

    Raises:
        OSError: This process has no file descriptors left.
    """

    def __init__(self, data: bytes, fds: Sequence[int], readers: int) -> None:
        self.data = data
        self.fds: list[int] = []
        self._left = readers
        self._lock = threading.Lock()
        try:
            for fd in fds:
                self.fds.append(os.dup(fd))
        except BaseException:
            self._close()
            raise

    def done(self) -> None:
        """Records that a worker has received it or never will."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._close()

    def _close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Outbox:
    """The parent's thread that writes to a worker.

    Args:
        name: the thread's.
        fail: called with the exception that made a write fail. Not called when the worker has
            exited; the thread that reads the channel reports that.
    """

    def __init__(self, channel: Channel, name: str, fail: Callable[[BaseException], None]) -> None:
        self._channel = channel
        self._fail = fail
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._queued = 0  # parcels that the thread has not yet written
        self._gone = False  # whether the worker gets nothing any more
        self._ended = False
        # Nothing is put after the None that ends the thread, nor written before what is queued.
        self._lock = threading.Lock()
        self._thread = OwnThread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Starts the thread; then `end` must follow. In between, no Ctrl-C may lose this object."""
        self._thread.start()

    def put(self, parcel: Parcel) -> None:
        """Queues or writes a message. Messages are written in the order of the calls."""
        with self._lock:
            if self._ended:
                parcel.done()
            elif self._writes_at_once(parcel):
                self._write(parcel)
            else:
                self._queued += 1
                self._parcels.put(parcel)

    def _writes_at_once(self, parcel: Parcel) -> bool:
        # Not in the main thread: a signal's handler would run with the locks held, and may raise.
        return (
            not self._queued
            and not parcel.fds
            and threading.get_ident() != threading.main_thread().ident
            and self._channel.takes_at_once(parcel.data)
        )

    def end(self) -> None:
        """Ends the thread, after the channel was shut down."""
        with self._lock:
            self._ended = True
            self._parcels.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            self._write(parcel)
            with self._lock:
                self._queued -= 1

    def _write(self, parcel: Parcel) -> None:
        try:
            if not self._gone:
                self._channel.send_packed(parcel.data, parcel.fds)
        except ChannelClosed:
            self._gone = True
        except BaseException as error:  # no descriptor left: half of the message is written
            self._gone = True
            self._fail(error)
        finally:
            parcel.done()
