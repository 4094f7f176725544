"""Values that a trial calls a layer on, instead of the arguments of the real call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.region.rows import Division

MOST = 32  # numbers to try; each costs three calls per argument


def value_for(
    leaf: Any, division: Division, is_data: Callable[[Any], bool], random: Any
) -> tuple[Any, bool]:
    """Makes a value to replace a leaf, None if impossible; also returns whether it has rows."""
    if not is_data(leaf):
        if isinstance(leaf, tf.Tensor) and not hasattr(leaf, "assign"):
            return np.ones(leaf.shape, leaf.dtype.as_numpy_dtype), False
        return leaf, False
    dtype = tf.as_dtype(leaf.dtype)
    dense = isinstance(leaf, (tf.Tensor, np.ndarray))
    if tf.TensorShape(leaf.shape).rank is None:
        return None, True
    if not dense or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return None, True
    has_rows = division.fits(tf.TensorShape(leaf.shape)[0])
    shape = [4 if has_rows else leaf.shape[0], *[2 if d is None else d for d in leaf.shape[1:]]]
    made = random.normal(size=shape) if dtype.is_floating else random.integers(0, 2, shape)
    return made.astype(dtype.as_numpy_dtype), has_rows


def takes_integers(made: Sequence[tuple[Any, bool]]) -> bool:
    """Returns True if a value with rows has integers."""
    return any(
        has_rows and value is not None and np.issubdtype(value.dtype, np.integer)
        for value, has_rows in made
    )


def with_compared(
    made: Sequence[tuple[Any, bool]], compared: set[int]
) -> Iterator[list[tuple[Any, bool]]]:
    """Yields the values with a number that the layer compares with, in one integer argument each.

    The number replaces a different share of each row: half of the first, then less, none at last.

    Args:
        made: sequence of the results of `value_for`.
        compared: set of int.
    """
    for number in sorted(compared):
        for place, (value, has_rows) in enumerate(made):
            if not has_rows or not np.issubdtype(value.dtype, np.integer):
                continue
            info = np.iinfo(value.dtype)
            if not info.min <= number <= info.max:
                continue
            other = value.copy()
            for row, flat in enumerate(other.reshape(len(other), -1)):
                flat[: (flat.size + 1) // 2 - row if flat.size > 1 else row % 2] = number
            yield [*made[:place], (other, has_rows), *made[place + 1 :]]
