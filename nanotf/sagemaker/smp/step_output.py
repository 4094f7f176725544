"""The result of a step: one value for each microbatch, and ways to combine them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat.step_errors import python_operation
from nanotf.errors import InvalidArgumentTypeError, check_choice
from nanotf.sagemaker.smp import replicas, runtime

METHODS = ("variable", "add_n", "accumulate_n")


class StepOutput:
    """A value that a step's function returns, of all microbatches.

    Args:
        outputs: sequence of tensors, in the order of microbatches.

    Attributes:
        outputs: list of those tensors.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)

    def __repr__(self) -> str:
        return f"StepOutput(outputs={self.outputs!r})"

    def reduce_mean(self) -> Any:
        """Returns the mean over microbatches. Means of microbatches give the batch's mean."""
        return _scaled(self.reduce_sum(), len(self.outputs))

    def reduce_sum(self) -> Any:
        """Returns the sum over microbatches."""
        if self._is_sparse():
            return _joined(self.outputs)
        # Not `tf.add_n`, which holds all microbatches' gradients until the last is there.
        return functools.reduce(lambda total, output: total + output, self.outputs)

    def concat(self) -> Any:
        """Concatenates the tensors along their first axis."""
        return self._concatenated("concat")

    def stack(self) -> Any:
        """Stacks the tensors along a new first axis."""
        return tf.stack(self.outputs, axis=0)

    def merge(self) -> Any:
        """Restores the batch: concatenates the microbatches' rows."""
        return self._concatenated("merge")

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """Returns the mean over microbatches, and over the copies of the model.

        With several copies (`dp_size() > 1`), all must call this in the same order.

        Args:
            method: str, default "variable"; this and "accumulate_n" add one microbatch after the
                other; "add_n" adds all at once.
            var: `tf.Variable` or None, gets the mean, with method "variable".

        Raises:
            InvalidArgumentError: The method is unknown.
            InvalidArgumentTypeError: `var` is given with another method than "variable".
        """
        check_choice("method", method, METHODS)
        if var is not None and method != "variable":
            raise InvalidArgumentTypeError(
                f'`var` is used with method="variable". Received: method={method!r}, var={var!r}.'
            )
        if method == "add_n" and not self._is_sparse():
            mean = _scaled(tf.add_n(self.outputs), len(self.outputs))
        else:
            mean = self.reduce_mean()
        if runtime.has_replicas():
            mean = _over_replicas(mean)
        if var is None:
            return mean
        var.assign(tf.convert_to_tensor(mean))  # dense, also of an embedding's rows
        return var

    def _is_sparse(self) -> bool:
        return any(isinstance(output, tf.IndexedSlices) for output in self.outputs)

    def _concatenated(self, method: str) -> Any:
        if any(output.shape.rank == 0 for output in self.outputs):
            raise InvalidArgumentTypeError(
                f"{method}() needs tensors with rows. Received: scalars. Use stack(), "
                "reduce_mean() or reduce_sum()."
            )
        return tf.concat(self.outputs, axis=0)


def _over_replicas(value: Any) -> Any:
    """Averages a tensor over the copies of the model.

    Functions of Python are stateful operations, which a `tf.function` runs in the order of the
    program: on all copies the same.
    """
    if isinstance(value, tf.IndexedSlices):
        parts = [value.values, value.indices]
        like = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in parts]
        values, indices = python_operation(_all_rows, parts, like)
        # Rows side by side are a sum over the copies.
        return tf.IndexedSlices(_scaled(values, runtime.dp_size()), indices, value.dense_shape)
    return python_operation(_average, [value], [value])[0]


def _average(array: Any) -> Any:
    return replicas.average_over_replicas([np.asarray(array)])[0]


def _all_rows(values: Any, indices: Any) -> list[Any]:
    found = replicas.gather_over_replicas([values, indices])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def _joined(slices: Sequence[Any]) -> Any:
    """Returns the sum of gradients of an embedding, which name rows: all rows, side by side."""
    if not all(isinstance(part, tf.IndexedSlices) for part in slices):
        return tf.add_n([tf.convert_to_tensor(part) for part in slices])
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], axis=0),
        tf.concat([part.indices for part in slices], axis=0),
        slices[0].dense_shape,
    )


def _scaled(total: Any, count: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(total.values, count), total.indices, total.dense_shape)
    if total.dtype.is_integer:
        return tf.cast(total, tf.float64) / count
    # Not even a division by 1 runs in place: gradients of a large model would exist twice.
    return total / tf.cast(count, total.dtype) if count > 1 else total
