"""Pads short batches, so that all have one shape and a step is traced and compiled once.

Keras divides a weighted loss by the number of rows, not by the sum of weights (reduction
"sum_over_batch_size", both generations). With padding rows of weight 0 alone, the loss of a batch
of r rows, padded to b, would be r/b of what it was. Weights are therefore multiplied by b/r. The
reductions "sum" and "mean_with_sample_weight" need no factor.
"""

from __future__ import annotations

import numbers
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, check_choice

# Of these reductions of a loss, the first divides by the number of rows.
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


def pad_batches(dataset: Any, batch_size: int, reduction: str = "sum_over_batch_size") -> Any:
    """Pads each batch of fewer than `batch_size` rows with rows of sample weight 0.

    A step on a padded batch has the same loss and gradients as on the short one. Padding rows
    repeat rows of their batch, so they hold values that the model and the loss can take.

    Two things see the padding. Metrics given to `compile(metrics=...)` ignore weights: use
    `weighted_metrics`. Layers that mix rows (BatchNormalization) compute with all rows.
    In the loss that Keras logs for an epoch, a mean over batches weighted by their numbers of rows,
    a padded batch counts like a full one.

    Args:
        dataset: `tf.data.Dataset` of batches `(x, y)` or `(x, y, sample_weight)`, each a tensor or
            a nested structure of tensors of shape `(rows, ...)`.
        batch_size: int, above 0, the number of rows of each batch afterwards.
        reduction: str, one of `REDUCTIONS`, that of the model's loss. Default
            "sum_over_batch_size", which is Keras's default.

    Returns:
        A `tf.data.Dataset` of `(x, y, sample_weight)`, all of whose shapes begin with `batch_size`.
        Without weights in `dataset`, each row has weight 1, before the factor of the reduction.

    Raises:
        InvalidArgumentError: A value cannot be used, or elements are not such batches. While the
            dataset is read, a batch of more rows raises `tf.errors.InvalidArgumentError`.
        InvalidArgumentTypeError: An argument has another type.

    Example:
        >>> train = nanotf.data.pad_batches(rows.batch(32), 32)
        >>> model.fit(train, num_processes=4)
    """
    tf = require_tensorflow()
    check_choice("reduction", reduction, REDUCTIONS)
    _check_batch_size(batch_size)
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidArgumentTypeError(
            "`pad_batches` takes a tf.data.Dataset. Received: dataset of class "
            f"{type(dataset).__name__}. Make one, for instance by "
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)."
        )
    _check_elements(dataset.element_spec, batch_size)
    scales = reduction == REDUCTIONS[0]

    def padded(x: Any, y: Any, weights: Any = None) -> Any:
        return _padded(x, y, weights, int(batch_size), scales)

    # Deterministic, also where the dataset's options allow another order.
    return dataset.map(padded, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _check_batch_size(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidArgumentTypeError(
            f"`batch_size` must be an integer. Received: batch_size={value!r}. Pass the number of "
            "rows that the dataset's `batch()` was called with."
        )
    if value < 1:
        raise InvalidArgumentError(
            f"`batch_size` must be at least 1. Received: batch_size={value!r}. Pass the number of "
            "rows that the dataset's `batch()` was called with."
        )


def _check_elements(spec: Any, batch_size: int) -> None:
    """Refuses elements that are no batches with targets."""
    tf = require_tensorflow()
    if not (isinstance(spec, tuple) and len(spec) in (2, 3)):
        raise InvalidArgumentError(
            "`pad_batches` needs elements (x, y) or (x, y, sample_weight): the weights of padding "
            f"rows act on the loss of y. Received: element_spec={spec!r}. Add the targets."
        )
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec):
            raise InvalidArgumentError(
                f"`pad_batches` pads dense tensors. Received: {leaf!r} in element_spec. Convert "
                "it, for instance by `to_tensor()` of a ragged tensor in `dataset.map`."
            )
        if not leaf.shape.rank:  # unknown, or a scalar
            raise InvalidArgumentError(
                "`pad_batches` needs tensors with a dimension of rows. Received: "
                f"{leaf!r} in element_spec. Call `dataset.batch(batch_size)` first; after "
                "tf.py_function, call `set_shape` with the rank of each tensor."
            )
        if (leaf.shape[0] or 0) > batch_size:  # an unknown size is checked in `_padded`
            raise InvalidArgumentError(
                "A batch must have at most `batch_size` rows. Received: batch_size="
                f"{batch_size} and {leaf!r} in element_spec. Pass the dataset's batch size."
            )


def _padded(x: Any, y: Any, weights: Any, batch_size: int, scales: bool) -> Any:
    """Returns a batch's `(x, y, weights)` with `batch_size` rows."""
    tf = require_tensorflow()
    floats = tf.as_dtype(tf.keras.backend.floatx())
    rows = tf.shape(tf.nest.flatten(x)[0])[0]
    check = tf.debugging.assert_less_equal(
        rows, batch_size, f"nanotf.data.pad_batches: a batch has more than {batch_size} rows."
    )
    # Eagerly, the check has raised by now and is None; in a graph, it must run before `places`.
    with tf.control_dependencies([] if check is None else [check]):
        places = tf.range(batch_size) % rows
    is_real = tf.range(batch_size) < rows

    def pad(leaf: Any) -> Any:
        return tf.ensure_shape(tf.gather(leaf, places), [batch_size, *leaf.shape[1:]])

    def weigh(leaf: Any) -> Any:
        # Whole numbers could not hold the factor b/r.
        wide = pad(leaf if leaf.dtype.is_floating else tf.cast(leaf, floats))
        if scales:
            wide *= tf.cast(batch_size, wide.dtype) / tf.cast(rows, wide.dtype)
        real = tf.reshape(is_real, [batch_size] + [1] * (wide.shape.rank - 1))
        # Not a product: 0 times a weight that is infinite would be NaN.
        return tf.where(real, wide, tf.zeros([], wide.dtype))

    if weights is None:
        weights = tf.ones([rows], floats)
    return (
        tf.nest.map_structure(pad, x),
        tf.nest.map_structure(pad, y),
        tf.nest.map_structure(weigh, weights),
    )
