"""Pickles whose large arrays lie in a shared block next to them."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import numpy as np

from nanotf.wire.blocks import Block, Packing

_INLINE = 1 << 16  # bytes


class Pickled(NamedTuple):
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


class Packer(Packing):
    """The arrays of several pickles on their way into a block.

    Args:
        inline: in bytes; smaller arrays stay inside the pickle, and are not shared.
    """

    def __init__(self, inline: int = _INLINE) -> None:
        super().__init__()
        self._inline = inline

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Takes a buffer of a pickle; returns True if it stays inside the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # an array that is not contiguous
            return True
        if raw.nbytes < self._inline:
            return True
        self.add(np.frombuffer(raw, np.uint8))
        return False

    def places(self, since: int = 0) -> tuple[tuple[int, int], ...]:
        """Returns offset and size in bytes of the buffers from number `since` on."""
        return tuple((offset, array.nbytes) for offset, array in self.parts[since:])
