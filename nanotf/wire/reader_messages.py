"""Messages between the parent and a reader, a process that calls a dataset's `__getitem__`.

    parent                                     reader
      |  <- Hello                                |   started as workers are
      |  Setup (paths) ->                        |
      |  Dataset (a pickle, large arrays) ->     |   whenever the parent's object has changed
      |  Read (dataset, index) ->                |   seeds the random numbers, calls `__getitem__`
      |  <- BatchRead (a slot's number)          |   the batch's large arrays lie in the slot
      |     or BatchFailed (the exception)       |

A slot is memory of the reader that the parent maps. The parent returns slots with the next `Read`.
`Setup` and `Hello` are those of workers, see `messages`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.wire.messages import Message

# In `messages.Fork.transport`: the fork becomes a reader.
READS = "reads"


@dataclasses.dataclass(frozen=True)
class ReadMoment:
    """The part of a call in which a batch is read. Random numbers depend on it.

    Args:
        epoch: int, how many epochs of the dataset had ended when the pass began; -1 for the batches
            that Keras looks at before it begins.
        turn: int, counts the passes that began in this epoch.
    """

    epoch: int
    turn: int = 0


BEFORE = ReadMoment(-1)


@dataclasses.dataclass(frozen=True)
class Dataset(Message):
    """Parent -> reader: a dataset as it is now.

    The descriptors of `new` follow, in order.

    Args:
        dataset: int, its number in this call.
        seed: int, the call's seed.
        pickle: int, the number of the block with the pickle.
        nbytes: int, the pickle's size.
        arrays: tuple of int, the numbers of the blocks with its large arrays.
        new: tuple of (int, int), number and size in bytes of the blocks that the reader lacks.
        state: `process_state.ProcessState` of the parent.
    """

    dataset: int
    seed: int
    pickle: int
    nbytes: int
    arrays: tuple[int, ...]
    new: tuple[tuple[int, int], ...]
    state: Any


@dataclasses.dataclass(frozen=True)
class Read(Message):
    """Parent -> reader: read a batch.

    Args:
        number: int, which the answer repeats.
        dataset: int.
        index: int, the argument of `__getitem__`.
        moment: `ReadMoment`.
        free: tuple of int, slots that the parent needs no longer.
    """

    number: int
    dataset: int
    index: int
    moment: ReadMoment
    free: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class BatchRead(Message):
    """Reader -> parent: a batch.

    Args:
        number: int, of the `Read`.
        body: bytes, its pickle.
        places: tuple of (int, int), offset and size in bytes of its large arrays in the slot.
        slot: int, -1 if it has no large arrays.
        block: int or None, the size in bytes of the slot if it is new. Its descriptor follows.
    """

    number: int
    body: bytes
    places: tuple[tuple[int, int], ...]
    slot: int = -1
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class BatchFailed(Message):
    """Reader -> parent: reading a batch raised.

    Args:
        number: int, of the `Read`.
        summary: str, the exception in one line.
        traceback: str.
        exception: bytes, the pickled exception; empty if it cannot be pickled.
    """

    number: int
    summary: str
    traceback: str
    exception: bytes = b""
