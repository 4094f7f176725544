"""Datasets of generators, without what they do to the rest of their process.

| name | versions seen | why |
| --- | --- | --- |
| `tensorflow::data::ApplyPython311MemoryPatch` (C++) | 2.21 | see `from_generator` |
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from nanotf.compat.versions import require_tensorflow

# malloc.h; the thresholds are the highest to which glibc's own adaptation goes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 * 2**20  # bytes


def from_generator(generator: Callable[[], Iterable[Any]], signature: Any) -> Any:
    """Returns `tf.data.Dataset.from_generator`'s dataset.

    With Python 3.11 and later, TensorFlow fixes glibc's M_MMAP_THRESHOLD at 128 KiB when the
    first such dataset of a process is read, before its first element. From then on each larger
    tensor gets fresh pages, which the kernel clears: a step of a small CNN takes 1.4 times the
    processor time. So the thresholds are raised again.

    Args:
        generator: called for each iteration, first when the first element is read.
        signature: nested structure of `tf.TypeSpec`, of an element.
    """

    def begun() -> Iterable[Any]:
        with contextlib.suppress(AttributeError):  # not glibc
            malloc = ctypes.CDLL(None)
            malloc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
            malloc.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)
        return generator()

    return require_tensorflow().data.Dataset.from_generator(begun, output_signature=signature)
