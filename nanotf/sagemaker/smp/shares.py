"""Splits a batch of any number of rows among microbatches and copies of the model.

`smp.step` refuses a batch that is not divisible. `fit` has such batches: the last of an epoch. So
microbatches differ by a row, and each knows its share of the batch's mean.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from nanotf.sagemaker.smp import runtime


class Shares:
    """Splits the arguments of a step, where `smp.step` uses a `slicing.Slicing`.

    Args:
        *names: the step's arguments: nested structures of tensors of equal numbers of rows.
    """

    def __init__(self, *names: str) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the arguments of each microbatch of this copy, and its share as a further one.

        A share is a scalar: the mean over the microbatches of all copies of `share * value` is the
        mean of `value` over the batch's rows. A microbatch without rows gets the last row, and the
        share 0.

        Args:
            count: of this copy's microbatches.
        """
        batch = self.signature.bind(*args, **kwargs).args
        rows = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        everyone, first = count * runtime.dp_size(), count * runtime.dp_rank()
        found: list[Any] = []
        for number in range(first, first + count):
            begin, size = bounds(rows, everyone, number)
            begin, length = tf.minimum(begin, rows - 1), tf.maximum(size, 1)
            part = tf.nest.map_structure(lambda value: _rows(value, begin, length), batch)  # noqa: B023 - called here
            share = tf.cast(size * everyone, tf.float64) / tf.cast(rows, tf.float64)
            found.append(((*part, share), {}))
        return found


def bounds(rows: Any, count: int, number: int) -> tuple[Any, Any]:
    """Returns the first row of a part and its number of rows, which differ by at most 1.

    Args:
        rows: an int or an int64 scalar tensor.
        count: of parts.
        number: of the part, 0 to `count - 1`.
    """
    each, rest = rows // count, rows % count
    begin = number * each + tf.minimum(tf.cast(number, tf.int64), rest)
    return begin, each + tf.cast(number < rest, tf.int64)


def _rows(value: Any, begin: Any, length: Any) -> Any:
    # No tensor: None, where a batch has no sample weights.
    return value[begin : begin + length] if tf.is_tensor(value) else value
