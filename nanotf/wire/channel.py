"""A connection that carries messages together with file descriptors.

Both ends of the Unix socket show each other the pool's secret key before either unpickles
anything (`multiprocessing.connection`: an HMAC challenge in both directions).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection, reduction
from typing import Any

from nanotf.wire.memory_files import above_standard
from nanotf.wire.messages import Message

KEY_NBYTES = 32
SMALL = 2000  # bytes of a message that fits into the buffer of a socket that is writable

# The `errno`s of a process (or machine) without free file descriptors.
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class ChannelClosed(EOFError):
    """The other end is closed."""


def packed(message: Message) -> bytes:
    """Pickles a message for sending."""
    return bytes(reduction.ForkingPickler.dumps(message))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a connection of this machine, for channels."""
    ours, theirs = (
        socket.socket(fileno=above_standard(sock.detach()))
        for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    )
    return ours, theirs


class Channel:
    """One end of a connection, most often between the parent and a worker.

    Any thread may send; one thread receives.

    Args:
        sock: of family AF_UNIX, or of AF_INET between hosts, where no descriptor can be sent. The
            channel owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._connection = connection.Connection(sock.detach())
        # Keeps a message and its descriptors together.
        self._send_lock = threading.Lock()

    def show_key_first(self, key: bytes) -> None:
        """Checks the other end's key, then shows this one's, as a worker does.

        The other end calls `show_key_second`: two ends that both begin with a challenge would take
        it for the answer to their own. Raises `multiprocessing.AuthenticationError` if the keys
        differ.
        """
        connection.deliver_challenge(self._connection, key)
        connection.answer_challenge(self._connection, key)

    def show_key_second(self, key: bytes) -> None:
        """Shows the key, then checks the other end's, as the parent does after `poll`."""
        connection.answer_challenge(self._connection, key)
        connection.deliver_challenge(self._connection, key)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message and duplicates of file descriptors.

        Raises:
            ChannelClosed: The other end is closed.
            BlockingIOError: The other end has not read within the time of `limit`.
            OSError: This process has no file descriptors left.
        """
        # Packs before taking the lock. Packing allocates, so Python may collect garbage, and a
        # finalizer may wait for another thread that sends on this channel.
        self.send_packed(packed(message), fds)

    def send_packed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message that `packed` has pickled, as `send` does."""
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
                for fd in fds:
                    reduction.send_handle(self._connection, fd, 0)
        except OSError as error:
            # The other end is open and waits for descriptors, or it has not read in time.
            if error.errno in (*NO_DESCRIPTORS, errno.EAGAIN):
                raise
            raise ChannelClosed(str(error)) from error

    def takes_at_once(self, data: bytes) -> bool:
        """Returns True if `send_packed` of a message without descriptors would not wait now.

        Linux calls a Unix socket writable while three quarters of its buffer are free, BSD from
        `SMALL` bytes on.
        """
        if len(data) > SMALL:
            return False
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLOUT)
        return bool(poll.poll(0))

    def send_with(self, message: Message, *contents: Any) -> None:
        """Sends a message and then arrays of bytes, which are not copied.

        Raises:
            ChannelClosed: The other end is closed, or has not read within the time of `limit`.
        """
        data = packed(message)
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
                for content in contents:
                    self._connection.send_bytes(memoryview(content))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive_into(self, target: Any) -> None:
        """Receives the next array of bytes that follows a message.

        Args:
            target: a writable array of bytes, of the size that the message gives.

        Raises:
            ChannelClosed: The other end is closed, or has not written within the time of `limit`.
        """
        try:
            self._connection.recv_bytes_into(memoryview(target))
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            ChannelClosed: The other end is closed.
            BlockingIOError: The other end has written nothing within the time of `limit`.
        """
        try:
            return self._connection.recv()
        except BlockingIOError:  # an OSError, but the other end is only late
            raise
        except (EOFError, ConnectionResetError, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def receive_fds(self, count: int) -> list[int]:
        """Receives the descriptors that follow a message. The caller must close them.

        Raises:
            ChannelClosed: The other end is closed.
            OSError: This process has no file descriptors left.
        """
        fds: list[int] = []
        try:
            for _ in range(count):
                fd = reduction.recv_handle(self._connection)
                os.set_inheritable(fd, False)  # a received one is inheritable
                fds.append(fd)
        except (EOFError, OSError, RuntimeError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                raise
            # The byte came without a descriptor: the kernel drops one for which there is no number.
            if isinstance(error, RuntimeError):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
            raise ChannelClosed(str(error)) from error
        return fds

    def poll(self, timeout: float) -> bool:
        """Returns True if a message arrives within `timeout` seconds."""
        try:
            return self._connection.poll(timeout)
        except (EOFError, OSError):
            return True  # `receive` then raises

    def limit(self, seconds: float) -> None:
        """Sets the seconds after which reads and writes raise `BlockingIOError`; 0 for no limit."""
        # A socket's own timeout would make the descriptor non-blocking: `Connection` needs another.
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # a `struct timeval`
        with self._as_socket() as sock:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, value)

    def shut_down(self) -> None:
        """Closes the connection for both ends and for every process that holds a copy of an end.

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
            sock.detach()  # the descriptor is the connection's, and stays open

    def fileno(self) -> int:
        """Returns the descriptor, for `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()
