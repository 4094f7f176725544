"""Sends datagrams to a process without ever waiting for it."""

from __future__ import annotations

import collections
import errno
import socket
import struct
import threading

from nanotf.wire.blocks import Block

# The receiver's queue is full, or too many descriptors are under way.
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ETOOMANYREFS)


class InboxSender:
    """The sending end of a process's inbox. Any thread may send.

    Args:
        fd: a datagram socket, which all senders share; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        # Guarded by `_lock`. A block's descriptor stays open until its datagram is sent.
        self._pending: collections.deque[tuple[bytes, Block | None]] = collections.deque()
        self._sent = 0

    @property
    def sent(self) -> int:
        """The number of datagrams that were given to `send`."""
        return self._sent

    @property
    def has_pending(self) -> bool:
        """True while datagrams wait for room in the receiver's queue."""
        return bool(self._pending)

    def fileno(self) -> int:
        """Returns the descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, data: bytes, block: Block | None = None) -> bool:
        """Sends a datagram, or keeps it for `flush`.

        Args:
            block: its descriptor goes with the datagram.

        Returns:
            True if nothing is pending now.

        Raises:
            OSError: The receiver has ended.
        """
        with self._lock:
            self._sent += 1
            self._pending.append((data, block))  # behind those that wait, in order
            return self._flush()

    def flush(self) -> bool:
        """Sends pending datagrams, as many as there is room for. Returns and raises as `send`."""
        with self._lock:
            return self._flush()

    def abandon(self) -> None:
        """Drops pending datagrams: the receiver has ended. A fork may hold its inbox open."""
        with self._lock:
            self._pending.clear()

    def offer(self, data: bytes) -> None:
        """Sends a datagram, if there is room now, that does not count: the next one replaces it."""
        with self._lock:
            if not self._pending:
                self._try(data, None)

    def close(self) -> None:
        """Closes the socket. Pending datagrams are lost."""
        with self._lock:
            self._pending.clear()
            self._socket.close()

    def _flush(self) -> bool:
        while self._pending:
            try:
                if not self._try(*self._pending[0]):
                    return False
            except OSError:  # the receiver has ended: nobody gets the rest either
                self._pending.clear()
                raise
            self._pending.popleft()  # and the block's descriptor: the datagram has a duplicate
        return True

    def _try(self, data: bytes, block: Block | None) -> bool:
        fds = [] if block is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _packed(block.fd))]
        try:
            # By a flag: O_NONBLOCK would be set for all processes that share the socket.
            self._socket.sendmsg([data], fds, socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        return True


def _packed(fd: int) -> bytes:
    return struct.pack("i", fd)
