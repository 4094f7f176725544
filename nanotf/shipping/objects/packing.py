"""Pickles whose large arrays lie in a shared block next to them."""

from __future__ import annotations

import dataclasses
import pickle

from nanotf.wire.blocks import Block, aligned

_INLINE = 1 << 16  # bytes


@dataclasses.dataclass(frozen=True)
class Pickled:
    """A pickle whose large arrays lie in a block."""

    body: bytes
    buffers: tuple[tuple[int, int], ...]  # offset and size in bytes of each array in the block

    def arrays(self, block: Block) -> list[bytearray]:
        """Returns the buffers, copied out of the block; arrays over them are writable."""
        return [
            bytearray(block.array(offset, (nbytes,), "u1").data) for offset, nbytes in self.buffers
        ]

    def views(self, block: Block) -> list[memoryview]:
        """Returns the buffers as read-only memory of the block, which is not copied."""
        return [
            block.array(offset, (nbytes,), "u1").data.toreadonly()
            for offset, nbytes in self.buffers
        ]


class Packer:
    """Writer of the arrays of several pickles, one after another, into a block.

    Args:
        inline: in bytes; smaller arrays stay inside the pickle, and are not shared.
    """

    def __init__(self, inline: int = _INLINE) -> None:
        self.nbytes, self._inline = 0, inline
        self._buffers: list[tuple[int, memoryview]] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Takes a buffer of a pickle; returns True if it stays inside the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # an array that is not contiguous
            return True
        if raw.nbytes < self._inline:
            return True
        self._buffers.append((self.nbytes, raw))
        self.nbytes += aligned(raw.nbytes)
        return False

    def places(self, since: int) -> tuple[tuple[int, int], ...]:
        """Returns offset and size of the buffers from number `since` on."""
        return tuple((offset, raw.nbytes) for offset, raw in self._buffers[since:])

    def __len__(self) -> int:
        return len(self._buffers)

    def write(self, block: Block) -> None:
        """Copies all into a block of `nbytes`."""
        for offset, raw in self._buffers:
            block.array(offset, (raw.nbytes,), "u1")[...] = memoryview(raw).cast("B")
