"""Messages that processes send each other through mailboxes: datagrams, and shared blocks.

A datagram is a pickled object of a class below. Small arrays travel in it. Larger ones, and long
descriptions of many arrays, travel in a block, whose descriptor goes with a `LetterBlock`:

    [ array | array | ... | the pickled `Letter`, without content ]   each part aligned

The sender copies each array once, into the block. The receiver maps it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanotf.errors import InvalidArgumentTypeError, NanoError
from nanotf.wire.blocks import Block, Packing

Array = np.ndarray[Any, Any]

INLINE_BYTES = 2**14  # of a datagram; far below the send buffer of any system
DATAGRAM_BYTES = 2**16  # the receiver's buffer


@dataclass(frozen=True)
class Letter:
    """Arrays for another process."""

    source: int  # the sender's rank
    tag: str
    # Dtype and shape of each array, and its offset in bytes in `content` or in the block.
    arrays: tuple[tuple[np.dtype[Any], tuple[int, ...], int], ...]
    content: bytes | None = None  # the arrays, each aligned; None if they are in a block


@dataclass(frozen=True)
class LetterBlock:
    """A block that holds a letter; its descriptor comes with the datagram."""

    nbytes: int  # the size of the block
    offset: int  # where the pickled letter begins


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
        if array.dtype.hasobject:  # its bytes are addresses in this process
            raise InvalidArgumentTypeError(
                "A mailbox carries arrays of numbers, bools or bytes. Received: an array of dtype "
                f"{array.dtype} and shape {array.shape}, tag={tag!r}. Pickle its objects first."
            )
    packing = Packing()
    letter = Letter(source, tag, tuple((a.dtype, a.shape, packing.add(a)) for a in arrays))
    # The other half is for the descriptions, which may be longer all the same.
    if packing.nbytes <= INLINE_BYTES // 2:
        data = pickle.dumps(replace(letter, content=packing.content()), pickle.HIGHEST_PROTOCOL)
        if len(data) <= INLINE_BYTES:
            return data, None
    offset = packing.add(np.frombuffer(pickle.dumps(letter, pickle.HIGHEST_PROTOCOL), np.uint8))
    block = packing.block()
    return pickle.dumps(LetterBlock(block.nbytes, offset), pickle.HIGHEST_PROTOCOL), block


def unpack(message: Letter | LetterBlock, fd: int | None) -> tuple[Letter, list[Array]]:
    """Returns a letter and its arrays, which are writable.

    Args:
        message: the content of a datagram.
        fd: the descriptor of a `LetterBlock`'s block, owned from now on; None with a `Letter`.
    """
    if isinstance(message, Letter):
        assert message.content is not None
        content = bytearray(message.content)  # arrays over `bytes` would be read-only
        return message, [np.ndarray(s, d, content, offset) for d, s, offset in message.arrays]
    assert fd is not None  # the mailbox raises for a descriptor that the kernel dropped
    block = Block(message.nbytes, fd)  # closes `fd`: a letter that waits in a box holds none
    # The zeros behind a pickle are not read.
    head = block.array(message.offset, (block.nbytes - message.offset,), np.uint8)
    letter: Letter = pickle.loads(head.data)
    return letter, [block.array(offset, s, d) for d, s, offset in letter.arrays]
