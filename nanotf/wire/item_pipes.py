"""Two pipes between the parent and a worker that runs items in batches.

    parent                                   worker
      offer     a token for each item  -->     take      reads an item's token, then runs the item
      withdraw  reads the tokens left          |
      ended     reads the records      <--     record    writes the end of an item

1. The kernel gives each token to one reader. So an item is run once, or comes back to the parent,
   whatever the worker does meanwhile: it may hold the GIL, or have died.
2. A worker runs its items in the order of their tokens. Of the items whose tokens it has read, only
   the last can be without a record: after a death, that one was running.
3. A record outlives the worker that wrote it. One of at most `LONGEST` bytes is written whole or
   not at all.
4. Nobody waits for a pipe, so that a token or a record wakes no thread. Messages of the channel do
   that, once for many items.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections.abc import Iterator, Sequence

LONGEST = select.PIPE_BUF  # bytes of a record
MOST = 2048  # tokens in a pipe; their bytes fit into the least that Linux gives a pipe by default

_TOKEN = struct.Struct("<II")  # the number of the order, which tells one offer from another; item
_HEAD = struct.Struct("<IId")  # of a record: bytes of the result, item, seconds
_AT_ONCE = LONGEST // _TOKEN.size
_CHUNK = 1 << 16


class ItemPipes:
    """The parent's ends of a worker process's pipes, and the ends that the worker gets."""

    def __init__(self) -> None:
        self._tokens, self._offers = os.pipe()
        try:
            self._records, self._ends = os.pipe()
        except OSError:
            os.close(self._tokens)
            os.close(self._offers)
            raise
        self._open = [self._tokens, self._offers, self._records, self._ends]
        for fd in self._open:
            os.set_blocking(fd, False)
        self._part = b""  # of a record that is being written

    @property
    def of_worker(self) -> tuple[int, int]:
        """Returns the descriptors that the worker needs, see `ItemClaims`."""
        return self._tokens, self._ends

    def offer(self, order: int, items: Sequence[int]) -> int:
        """Offers items to the worker; returns how many of them, as many as the pipe holds."""
        offered = 0
        with contextlib.suppress(BlockingIOError):
            while some := items[offered : offered + _AT_ONCE]:
                data = b"".join(_TOKEN.pack(order & 0xFFFFFFFF, item) for item in some)
                os.write(self._offers, data)  # all or nothing
                offered += len(some)
        return offered

    def withdraw(self) -> list[int]:
        """Takes back all items that the worker has not taken; they are in order."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                found += os.read(self._tokens, _CHUNK)
        return [item for _, item in _TOKEN.iter_unpack(found)]

    def ended(self) -> Iterator[tuple[int, float, bytes]]:
        """Yields what the worker has recorded since: the item, its seconds, and its result."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._records, _CHUNK):
                yield from self._whole(self._part + data)

    def _whole(self, data: bytes) -> Iterator[tuple[int, float, bytes]]:
        begin = 0
        while len(data) - begin >= _HEAD.size:
            nbytes, item, seconds = _HEAD.unpack_from(data, begin)
            end = begin + _HEAD.size + nbytes
            if end > len(data):
                break
            yield item, seconds, data[begin + _HEAD.size : end]
            begin = end
        self._part = data[begin:]

    def close(self) -> None:
        """Closes the descriptors."""
        while self._open:
            os.close(self._open.pop())


class ItemClaims:
    """A worker's ends of its pipes.

    Args:
        tokens, ends: descriptors, see `ItemPipes.of_worker`; they belong to this object.
    """

    def __init__(self, tokens: int, ends: int) -> None:
        self._tokens, self._ends = tokens, ends
        self._next = b""  # the token of an order that comes

    def take(self, order: int, item: int) -> bool:
        """Takes an item of an order; returns False if the parent has taken it back."""
        if not self._next:
            try:
                self._next = os.read(self._tokens, _TOKEN.size)
            except BlockingIOError:
                return False
        if self._next != _TOKEN.pack(order & 0xFFFFFFFF, item):
            return False  # this order's items are the parent's; the token is of a later one
        self._next = b""
        return True

    def record(self, item: int, seconds: float, result: bytes) -> bool:
        """Records the end of an item; returns False if the record is too long for the pipe now."""
        data = _HEAD.pack(len(result), item, seconds) + result
        if len(data) > LONGEST:
            return False
        try:
            return os.write(self._ends, data) == len(data)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Closes the descriptors."""
        os.close(self._tokens)
        os.close(self._ends)
