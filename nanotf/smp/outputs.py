"""The result of a step: one value for each microbatch, and ways to combine them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from nanotf.errors import InvalidArgumentTypeError, check_choice

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
        total = self.outputs[0]
        for output in self.outputs[1:]:  # one by one: each can be freed once it is added
            total = total + output
        return total

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
        """Returns the mean over microbatches, as `reduce_mean` does.

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
            return _scaled(tf.add_n(self.outputs), len(self.outputs))
        mean = self.reduce_mean()
        if var is None:
            return mean
        var.assign(tf.convert_to_tensor(mean))
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
    return total / tf.cast(count, total.dtype)
