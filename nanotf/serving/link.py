"""The connection between the front and a worker: messages with long contents.

Each end waits for the other's answer before it sends again. So one piece of shared memory for each
direction is enough, and its content stays until the answer is sent.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

from nanotf.wire.blocks import Block

INLINE = 1 << 15  # bytes that travel through the socket; more travel in shared memory
KEPT = 1 << 23  # bytes of the memory that an end keeps; a longer message gets some of its own
_MESSAGE = 1 << 17  # bytes; more than a message has
_LENGTH = struct.Struct("I")


class LinkClosed(EOFError):
    """The other end is closed."""


class Link:
    """One end of the connection.

    Args:
        sock: of type SOCK_SEQPACKET: each message arrives whole. The link owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._mine: Block | None = None  # memory of contents that this end sends
        self._theirs: Block | None = None

    @staticmethod
    def pair() -> tuple[Link, socket.socket]:
        """Returns one end, which does not wait when it sends, and the socket of the other."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # the front's only thread must not wait for a worker
        return Link(ours), theirs

    def send(self, header: Any, contents: Sequence[bytes] = ()) -> None:
        """Sends a message. The other end has answered the last one.

        Args:
            header: of classes that both ends know.

        Raises:
            LinkClosed: The other end is closed.
            OSError: This process has no memory or descriptors left.
        """
        pieces = [pickle.dumps(header, 5), *contents]
        sizes = [len(piece) for piece in pieces]
        total = sum(sizes)
        if total <= INLINE:
            self._put([_packed(sizes, 0, False), *pieces])
            return
        block = self._memory(total)
        is_new = block is not self._mine
        offset = 0
        for piece in pieces:
            block.write_bytes(offset, piece)
            offset += len(piece)
        assert block.fd is not None
        self._put([_packed(sizes, block.nbytes, is_new)], [block.fd] if is_new else [])
        if block.nbytes == KEPT:
            self._mine = block  # no earlier: the other end has it now
        else:
            block.close_fd()

    def _memory(self, nbytes: int) -> Block:
        return Block(nbytes) if nbytes > KEPT else self._mine or Block(KEPT)

    def _put(self, parts: Sequence[bytes], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.sock, parts, list(fds))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> tuple[Any, list[memoryview]]:
        """Waits for a message, unless the socket does not wait.

        Returns:
            The header, and the contents, which are valid until this end sends.

        Raises:
            LinkClosed: The other end is closed.
            OSError: This process has no descriptors left for the message's memory.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(self.sock, _MESSAGE, 1)
        except ConnectionResetError as error:
            raise LinkClosed(str(error)) from error
        if not data:
            raise LinkClosed
        view = memoryview(data)
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        sizes, nbytes, is_new = pickle.loads(view[_LENGTH.size : end])
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != is_new:
            # The kernel drops a descriptor for which this process has no number left. What the
            # memory of an earlier message holds is somebody else's.
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "a message has lost its memory: no file descriptors left")
        view, begin = (self._mapped(nbytes, fds), 0) if nbytes else (view, end)
        pieces = []
        for size in sizes:
            pieces.append(view[begin : begin + size])
            begin += size
        return pickle.loads(pieces[0]), pieces[1:]

    def _mapped(self, nbytes: int, fds: Sequence[int]) -> memoryview:
        if not fds:
            assert self._theirs is not None, "the first message in shared memory brings it"
            return self._theirs.view()
        block = Block(nbytes, fds[0])
        if nbytes == KEPT:
            self._theirs = block
        return block.view()

    def close(self) -> None:
        """Closes this end, and gives its memory back."""
        self.sock.close()
        for block in (self._mine, self._theirs):
            if block is not None:
                block.close_fd()
        self._mine = self._theirs = None


def _packed(sizes: Sequence[int], nbytes: int, is_new: bool) -> bytes:
    data = pickle.dumps((sizes, nbytes, is_new), 5)
    return _LENGTH.pack(len(data)) + data
