"""Arrays, laid out in one shared block."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotf.wire.blocks import Block, Packing

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


class PackedArrays(Packing):
    """Arrays on their way into a block, with what `view` needs to find them there.

    Args:
        arrays: those of Python objects and of texts are pickled at once.
    """

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        super().__init__()
        self.arrays = list(arrays)
        self.refs = tuple(map(self._place, arrays))

    def _place(self, array: np.ndarray[Any, Any]) -> ArrayRef:
        raw, stored_as = array, dtype_name(array.dtype)
        if array.dtype.kind in "OUS":
            pickled = pickle.dumps(np.array(array, dtype=object), protocol=5)
            raw, stored_as = np.frombuffer(pickled, dtype=np.uint8), PICKLED
        return ArrayRef(self.add(raw), tuple(array.shape), stored_as, raw.nbytes)
