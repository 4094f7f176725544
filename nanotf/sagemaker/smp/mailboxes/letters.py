"""Messages that processes send each other through mailboxes: datagrams, and shared blocks.

A datagram is a pickled object of a class below. Small arrays travel in it. Larger ones, and long
descriptions of many arrays, travel in a block, whose descriptor goes with a `LetterBlock`:

    [ the pickled `Letter`, without content | array | array | ... ]   each part aligned

The sender copies each array once, into the block. The receiver maps it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanotf.errors import InvalidArgumentTypeError, NanoError
from nanotf.wire.blocks import Block, aligned

Array = np.ndarray[Any, Any]

INLINE_BYTES = 2**14  # of a datagram; far below the send buffer of any system
DATAGRAM_BYTES = 2**16  # the receiver's buffer


@dataclass(frozen=True)
class Letter:
    """Arrays for another process."""

    source: int  # the sender's rank
    tag: str
    likes: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]  # dtype and shape of each array
    content: bytes | None = None  # the arrays, each aligned; None if they are in a block


@dataclass(frozen=True)
class LetterBlock:
    """A block that holds a letter; its descriptor comes with the datagram."""

    nbytes: int  # the size of the block
    head: int  # the size of the pickled letter at its start


@dataclass(frozen=True)
class MailboxWait:
    """A receive that waits for a letter."""

    number: int  # counts the receives of a mailbox
    source: int  # the rank that should send the letter
    what: str  # the receive, for people


@dataclass(frozen=True)
class WaitReport:
    """The state of a rank that waits, sent to its supervisor about once a second."""

    rank: int
    waits: tuple[MailboxWait, ...]  # all of this moment
    sent: tuple[int, ...]  # the letters sent so far, by destination
    received: tuple[int, ...]  # the letters received so far, by source
    seconds: float  # processor time that its process has used
    is_busy: bool = False  # another thread runs, or would run if it had a core


@dataclass(frozen=True)
class Introduction:
    """A rank begins, and tells its supervisor its part of the work."""

    rank: int
    partition: int  # the part of a model that it has
    about: str  # equal on all ranks that fit together


@dataclass(frozen=True)
class RankEnded:
    """The supervisor tells the ranks that one has ended as it should."""

    rank: int


@dataclass(frozen=True)
class AllFailed:
    """The supervisor tells the ranks that all fails."""

    error: NanoError  # raised by every call from now on


@dataclass(frozen=True)
class Wake:
    """A mailbox wakes its own thread."""


def pack(source: int, tag: str, arrays: Sequence[Array]) -> tuple[bytes, Block | None]:
    """Packs arrays for sending.

    Args:
        source: this process's rank.
        arrays: of any dtype but `object`.

    Returns:
        The datagram, and the block that goes with it, or None.

    Raises:
        InvalidArgumentTypeError: An array holds Python objects.
    """
    for array in arrays:
        if array.dtype.hasobject:
            raise InvalidArgumentTypeError(
                "A mailbox carries arrays of numbers, bools or bytes. Received: an array of dtype "
                f"{array.dtype} and shape {array.shape}, tag={tag!r}. Pickle its objects first."
            )
    # `ascontiguousarray` gives a scalar a dimension; `reshape` takes it away.
    arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in arrays]
    letter = Letter(source, tag, tuple((array.dtype, array.shape) for array in arrays))
    # The other half is for `likes`, which may be longer all the same.
    if sum(aligned(array.nbytes) for array in arrays) <= INLINE_BYTES // 2:
        parts = [_bytes_of(array).ljust(aligned(array.nbytes), b"\0") for array in arrays]
        data = pickle.dumps(replace(letter, content=b"".join(parts)), pickle.HIGHEST_PROTOCOL)
        if len(data) <= INLINE_BYTES:
            return data, None
    head = pickle.dumps(letter, pickle.HIGHEST_PROTOCOL)
    offsets, nbytes = _offsets(letter, aligned(len(head)))
    block = Block(nbytes)
    block.write(0, np.frombuffer(head, np.uint8))
    for offset, array in zip(offsets, arrays, strict=True):
        block.write(offset, array)
    return pickle.dumps(LetterBlock(block.nbytes, len(head)), pickle.HIGHEST_PROTOCOL), block


def unpack(message: Letter | LetterBlock, fd: int | None) -> tuple[Letter, list[Array]]:
    """Returns a letter and its arrays, which are writable.

    Args:
        message: the content of a datagram.
        fd: the descriptor of a `LetterBlock`'s block, owned from now on; None with a `Letter`.
    """
    if isinstance(message, Letter):
        assert message.content is not None
        content = np.frombuffer(bytearray(message.content), np.uint8)
        offsets, _ = _offsets(message, 0)
        made = [
            np.ndarray(shape, dtype, content.data, offset)
            for (dtype, shape), offset in zip(message.likes, offsets, strict=True)
        ]
        return message, made
    assert fd is not None
    block = Block(message.nbytes, fd)
    letter: Letter = pickle.loads(block.array(0, (message.head,), np.uint8).data)
    offsets, _ = _offsets(letter, aligned(message.head))
    arrays = [
        block.array(offset, shape, dtype)
        for (dtype, shape), offset in zip(letter.likes, offsets, strict=True)
    ]
    return letter, arrays


def _bytes_of(array: Array) -> bytes:
    return array.tobytes()


def _offsets(letter: Letter, begin: int) -> tuple[list[int], int]:
    """Returns where each array begins, and where the last one ends."""
    offsets = []
    for dtype, shape in letter.likes:
        offsets.append(begin)
        begin += aligned(dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return offsets, begin
