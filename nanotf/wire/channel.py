"""A connection that carries messages and, with them, file descriptors.

Both ends of the Unix socket show each other the pool's secret key before either unpickles
anything (`multiprocessing.connection`: an HMAC challenge in both directions).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection, reduction
from typing import Any

from nanotf.wire.messages import Message

KEY_NBYTES = 32

# What `OSError` says of a process (or machine) without file descriptors.
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class ChannelClosed(EOFError):
    """The other end has gone."""


def packed(message: Message) -> bytes:
    """A message as it is sent."""
    return bytes(reduction.ForkingPickler.dumps(message))


class Channel:
    """One end of the connection between the parent and a worker.

    Any thread may send; one thread receives.

    Args:
        sock: `socket.socket` of family AF_UNIX; the channel owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._connection = connection.Connection(sock.detach())
        # Keeps a message and the descriptors that belong to it together.
        self._send_lock = threading.Lock()

    def show_key_first(self, key: bytes) -> None:
        """Asks for the secret key, then shows it: the worker's order. Raises on a wrong one."""
        connection.deliver_challenge(self._connection, key)
        connection.answer_challenge(self._connection, key)

    def show_key_second(self, key: bytes) -> None:
        """Shows the key in the parent's order: it can wait for the worker to begin, see `poll`."""
        connection.answer_challenge(self._connection, key)
        connection.deliver_challenge(self._connection, key)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message and duplicates of file descriptors.

        Raises:
            ChannelClosed: The other end has gone.
            BlockingIOError: It has not read for the time of `limit`.
            OSError: This process has no file descriptors left.
        """
        # Before the lock is taken: it makes objects, Python may then collect others, and what
        # those do at their end may send, too, in another thread that this one waits for.
        self.send_packed(packed(message), fds)

    def send_packed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message that `packed` has returned; see `send`."""
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
                for fd in fds:
                    reduction.send_handle(self._connection, fd, 0)
        except OSError as error:
            # The other end is there, and waits for them; or it has not read in time.
            if error.errno in (*NO_DESCRIPTORS, errno.EAGAIN):
                raise
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            ChannelClosed: The other end has gone.
            BlockingIOError: It has written nothing for the time of `limit`.
        """
        try:
            return self._connection.recv()
        except BlockingIOError:
            raise
        except (EOFError, ConnectionResetError, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def receive_fds(self, count: int) -> list[int]:
        """Takes the descriptors that follow a message, which the caller has to close.

        Raises:
            ChannelClosed: The other end has gone.
            OSError: This process has no file descriptors left.
        """
        fds: list[int] = []
        try:
            for _ in range(count):
                fd = reduction.recv_handle(self._connection)
                os.set_inheritable(fd, False)
                fds.append(fd)
        except (EOFError, OSError, RuntimeError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                raise
            if isinstance(error, RuntimeError):  # the byte has come, and the kernel gave none
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
            raise ChannelClosed(str(error)) from error
        return fds

    def poll(self, timeout: float) -> bool:
        """Returns True if a message arrives within `timeout` seconds."""
        try:
            return self._connection.poll(timeout)
        except (EOFError, OSError):
            return True  # let `receive` say it

    def limit(self, seconds: float) -> None:
        """Makes reading and writing raise `BlockingIOError` after so long; 0 for no limit."""
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # a `struct timeval`
        with self._as_socket() as sock:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, value)

    def shut_down(self) -> None:
        """Closes the connection for both ends and for every process that holds a copy of one.

        Threads that wait in `send` and `receive` raise `ChannelClosed`.
        """
        with contextlib.suppress(OSError), self._as_socket() as sock:
            sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _as_socket(self) -> Iterator[socket.socket]:
        sock = socket.socket(fileno=self._connection.fileno())
        try:
            yield sock
        finally:
            sock.detach()

    def fileno(self) -> int:
        """The descriptor, for `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()
