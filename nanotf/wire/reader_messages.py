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
    """The part of a call in which a batch is read. Random numbers depend on it."""

    # How many epochs of the dataset had ended when the pass began; -1 for the batches that Keras
    # looks at before it begins.
    epoch: int
    turn: int = 0  # counts the passes that began in this epoch


BEFORE = ReadMoment(-1)


@dataclasses.dataclass(frozen=True)
class Dataset(Message):
    """Parent -> reader: a dataset as it is now.

    The descriptors of `new` follow, in order.
    """

    dataset: int  # its number in this call
    seed: int  # the call's
    pickle: int  # the number of the block with the pickle
    nbytes: int  # the pickle's size
    arrays: tuple[int, ...]  # the numbers of the blocks with its large arrays
    new: tuple[tuple[int, int], ...]  # number and size in bytes of the blocks that the reader lacks
    state: Any  # `process_state.ProcessState` of the parent


@dataclasses.dataclass(frozen=True)
class Read(Message):
    """Parent -> reader: read a batch."""

    number: int  # which the answer repeats
    dataset: int  # as in `Dataset`
    index: int  # the argument of `__getitem__`
    moment: ReadMoment
    free: tuple[int, ...] = ()  # slots that the parent needs no longer


@dataclasses.dataclass(frozen=True)
class BatchRead(Message):
    """Reader -> parent: a batch."""

    number: int  # of the `Read`
    body: bytes  # its pickle
    places: tuple[tuple[int, int], ...]  # offset and size in bytes of its large arrays in the slot
    slot: int = -1  # -1 if it has no large arrays
    block: int | None = None  # the size in bytes of the slot if it is new; its descriptor follows


@dataclasses.dataclass(frozen=True)
class BatchFailed(Message):
    """Reader -> parent: reading a batch raised."""

    number: int  # of the `Read`
    summary: str  # the exception in one line
    traceback: str
    exception: bytes = b""  # the pickled exception; empty if it cannot be pickled
