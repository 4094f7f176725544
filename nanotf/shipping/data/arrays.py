"""Arrays, laid out in one shared block."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotf.wire.blocks import Block, aligned

PICKLED = "pickled"


@dataclasses.dataclass(frozen=True)
class ArrayRef:
    """The place of an array in a block."""

    offset: int  # in bytes from the block's start
    shape: tuple[int, ...]
    # A dtype name that NumPy (with ml_dtypes for bfloat16) knows, or `PICKLED` for an array of
    # Python objects (mostly strings), which is stored as a pickle.
    dtype: str
    nbytes: int  # as stored: of a pickled array, the pickle's size


def lay_out(arrays: Sequence[Any]) -> tuple[list[ArrayRef], int]:
    """Assigns every array an aligned place.

    Args:
        arrays: objects with `shape`, `dtype` and `nbytes`.

    Returns:
        The references, in order, and the total size in bytes.
    """
    refs, offset = [], 0
    for array in arrays:
        refs.append(ArrayRef(offset, tuple(array.shape), dtype_name(array.dtype), array.nbytes))
        offset += aligned(array.nbytes)
    return refs, offset


def dtype_name(dtype: Any) -> str:
    """Returns the name by which `numpy_dtype` finds a dtype in another process."""
    found: np.dtype[Any] = np.dtype(dtype)
    # Extension types such as ml_dtypes' bfloat16 show up as opaque bytes in `dtype.str`.
    return str(found.name if found.kind == "V" else found.str)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of a name from `dtype_name` or of a TensorFlow dtype's name."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with TensorFlow

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extension


def view(block: Block, ref: ArrayRef) -> np.ndarray[Any, Any]:
    """Returns the array that `ref` describes. It shares the block's memory unless pickled."""
    if ref.dtype == PICKLED:
        raw = block.array(ref.offset, (ref.nbytes,), np.uint8)
        array: np.ndarray[Any, Any] = pickle.loads(raw.data)
        return array
    return block.array(ref.offset, ref.shape, numpy_dtype(ref.dtype))


class Packing:
    """Arrays on their way into a block.

    Args:
        arrays: those of Python objects and of texts are pickled at once.
    """

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self.arrays = list(arrays)
        self._raw = [_raw(array) for array in arrays]
        places, self.nbytes = lay_out(self._raw)
        self.refs = [
            dataclasses.replace(place, shape=tuple(array.shape), dtype=PICKLED)
            if raw is not array
            else place
            for place, array, raw in zip(places, arrays, self._raw, strict=True)
        ]
        self._places = places

    def write(self, block: Block, start: int = 0) -> None:
        """Copies the arrays into a block, from byte `start` on."""
        for place, raw in zip(self._places, self._raw, strict=True):
            if raw.flags.c_contiguous:
                block.write(place.offset + start, raw)
            else:  # which `Block.write` cannot take
                view(block, dataclasses.replace(place, offset=place.offset + start))[...] = raw


def _raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind in "OUS":
        objects = np.array(array, dtype=object)
        return np.frombuffer(pickle.dumps(objects, protocol=5), dtype=np.uint8)
    return array
