"""Sends a dataset with `__getitem__` to readers, whenever it has changed, and its batches back.

A dataset is pickled by the parent at the beginning of each epoch. What `on_epoch_end`, a callback
or anything else has changed in the user's object thus reaches the readers. Arrays of `LARGE` bytes
or more lie in shared blocks of their own, which all readers map and which are copied again only if
their content differs.

Batches come back as pickles whose arrays lie in a reader's slots. The parent's arrays share that
memory; a slot is free when no array over it is left.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import io
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanotf.shipping.objects import pickling
from nanotf.shipping.objects.packing import Packer
from nanotf.wire.blocks import PAGE, Block, aligned

LARGE = 1 << 20  # bytes
_CHUNK = 1 << 20  # bytes that are compared at once
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


# ------------------------------------------------------------------ the dataset, in the parent
@dataclasses.dataclass(frozen=True)
class DatasetSnapshot:
    """A dataset as it was at one moment."""

    pickle: Block
    nbytes: int  # the pickle's size; its block may be larger
    arrays: tuple[Block, ...]  # one for each large array, in the order in which the pickle has them

    def blocks(self) -> tuple[Block, ...]:
        """Returns all blocks."""
        return self.pickle, *self.arrays


def snapshot(dataset: Any, last: DatasetSnapshot | None = None) -> DatasetSnapshot:
    """Pickles a dataset.

    Args:
        dataset: the user's object.
        last: an earlier one, whose blocks are used again where equal; None if there is none.

    Returns:
        A new one, or `last` itself if nothing has changed.

    Raises:
        ShippingError: The dataset cannot be sent to another process; the message names it.
    """
    packer, file = Packer(inline=LARGE), io.BytesIO()
    with pickling.naming(f"The {type(dataset).__qualname__} that reader processes read"):
        pickling.dump(_DatasetPickler(file, buffer_callback=packer.take), dataset)
    body = np.frombuffer(file.getvalue(), np.uint8)
    large = [array for _, array in packer.parts]
    same = dict[int, Block]()
    if last is not None:
        pairs = enumerate(zip(last.arrays, large, strict=False))
        same = {n: block for n, (block, array) in pairs if _holds(block, array)}
        unchanged = len(same) == len(large) == len(last.arrays)
        if unchanged and last.nbytes == body.nbytes and _holds(last.pickle, body):
            return last
    arrays = (same.get(n) or _block_of(array) for n, array in enumerate(large))
    return DatasetSnapshot(_block_of(body), body.nbytes, tuple(arrays))


def _holds(block: Block, new: np.ndarray[Any, Any]) -> bool:
    """Returns True if a block has some bytes; compares piece by piece, to save memory."""
    if block.nbytes != Block.size_for(new.nbytes):
        return False
    old = block.array(0, (new.nbytes,), np.uint8)
    return all(
        np.array_equal(old[first : first + _CHUNK], new[first : first + _CHUNK])
        for first in range(0, new.nbytes, _CHUNK)
    )


def _block_of(content: np.ndarray[Any, Any]) -> Block:
    block = Block(content.nbytes)
    block.write(0, content)
    return block


class _DatasetPickler(pickling.TensorPickler):
    """Pickler that marks random number generators, for `loads` to find."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in _GENERATORS:
            return _rebuild_generator, (pickle.dumps(obj),)
        return super().reducer_override(obj)


# ------------------------------------------------------------------ the dataset, in a reader
@dataclasses.dataclass
class Held:
    """A random number generator that a dataset holds."""

    generator: Any  # one of `_GENERATORS`
    origin: bytes  # identifies its state in the parent, and its place in the dataset

    def seed(self, key: bytes) -> None:
        """Sets a state that depends on the generator's own and on a key."""
        digest = hashlib.sha256(self.origin + key).digest()
        if isinstance(self.generator, random.Random):
            self.generator.seed(digest)
            return
        words = np.random.SeedSequence(np.frombuffer(digest, np.uint32).tolist())
        if isinstance(self.generator, np.random.RandomState):
            kind = self.generator.get_state(legacy=False)["bit_generator"]
            self.generator.set_state(getattr(np.random, kind)(words).state)
        else:
            bits = self.generator.bit_generator
            bits.state = type(bits)(words).state


# While `loads` runs.
_found: contextvars.ContextVar[list[Held] | None] = contextvars.ContextVar("found", default=None)


def _rebuild_generator(data: bytes) -> Any:
    generator = pickle.loads(data)
    if (found := _found.get()) is not None:
        found.append(Held(generator, hashlib.sha256(data).digest()))
    return generator


@contextlib.contextmanager
def _finding() -> Iterator[list[Held]]:
    found: list[Held] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def loads(body: Any, arrays: list[Any]) -> tuple[Any, list[Held]]:
    """Makes a dataset from a `DatasetSnapshot`, in a reader.

    Args:
        body: the pickle, bytes-like.
        arrays: its large arrays, bytes-like; the dataset's arrays share their memory.

    Returns:
        The dataset, and the generators that it holds.
    """
    with _finding() as found:
        dataset = pickle.loads(body, buffers=arrays)
    for place, held in enumerate(found):  # two generators in one state differ afterwards, too
        held.origin += place.to_bytes(4, "big")
    return dataset, found


# ----------------------------------------------------------------------------- the batches
class _BatchPickler(pickling.TensorPickler):
    """Pickler that keeps arrays out of the pickle, whatever their strides."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and obj.dtype.kind != "O" and not obj.flags.forc:
            return np.ascontiguousarray(obj).__reduce_ex__(5)
        return super().reducer_override(obj)


def pack_batch(batch: Any) -> tuple[bytes, Packer]:
    """Pickles a batch, in a reader; returns the pickle and the arrays beside it.

    Raises:
        ShippingError: Something in it cannot be sent to the parent.
    """
    packer, file = Packer(), io.BytesIO()
    pickling.dump(_BatchPickler(file, buffer_callback=packer.take), batch)
    return file.getvalue(), packer


def unpack_batch(
    body: bytes, slot: np.ndarray[Any, Any] | None, places: tuple[tuple[int, int], ...]
) -> Any:
    """Undoes `pack_batch`, in the parent, without a copy.

    Args:
        slot: bytes, which stay alive as long as an array of the batch; None if there are no arrays.
        places: offset and size in bytes of the arrays in `slot`.
    """
    buffers = [] if slot is None else [slot[begin : begin + n].data for begin, n in places]
    return pickle.loads(body, buffers=buffers)


class BatchMemory:
    """A reader's memory for batches, which grows with what the parent holds."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []  # by number of the slot
        self._free: set[int] = set()  # slots without an array that the parent still has

    def release(self, numbers: tuple[int, ...]) -> None:
        """Takes back slots that the parent needs no longer."""
        self._free.update(numbers)

    def write(self, packer: Packer) -> tuple[int, Block | None]:
        """Writes arrays to a slot; returns its number, and its block if it is new."""
        fitting = [n for n in self._free if self._blocks[n].nbytes >= packer.nbytes]
        if fitting:  # the smallest, so that larger ones stay for larger batches
            number = min(fitting, key=lambda n: self._blocks[n].nbytes)
            self._free.remove(number)
            packer.write(self._blocks[number])
            return number, None
        block = Block(aligned(packer.nbytes, PAGE))
        packer.write(block)
        if self._free:  # too small
            number = self._free.pop()
            self._blocks[number] = block
        else:
            number = len(self._blocks)
            self._blocks.append(block)
        return number, block
