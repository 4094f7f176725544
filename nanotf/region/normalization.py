"""Computes batch statistics of the whole batch inside a region.

Each worker computes the mean and the sum of squared deviations of its rows. One exchange collects
them from all workers. The statistics of the batch follow from them (Chan, Golub and LeVeque, 1979),
without the cancellation of a mean of squares.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from nanotf.region import rows, scope


def _is_over_rows(x: Any, axes: Any) -> bool:
    """Returns True for statistics over the rows of the batch of a region or a proof."""
    if scope.proof is not None:
        return bool(scope.proof.note_statistics(tf.convert_to_tensor(x), tf.nest.flatten(axes)))
    return scope.region is not None and bool(scope.region.is_over_rows())


def moments(stock: Any, _: Any) -> Any:
    """Makes `tf.nn.moments` count the rows of all workers; see `overrides`."""

    @functools.wraps(stock)
    def nn_moments(
        x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: Any = None
    ) -> Any:
        if not _is_over_rows(x, axes):
            return stock(x, axes, shift, keepdims, name)
        x = tf.convert_to_tensor(x)
        mean, variance = _of_batch(x, axes, None)
        return _squeezed(x, axes, keepdims, mean, variance)

    return nn_moments


def weighted_moments(stock: Any, _: Any) -> Any:
    """Does the same for `tf.nn.weighted_moments`."""

    @functools.wraps(stock)
    def nn_weighted_moments(
        x: Any, axes: Any, frequency_weights: Any, keepdims: bool = False, name: Any = None
    ) -> Any:
        if not _is_over_rows(x, axes):
            return stock(x, axes, frequency_weights, keepdims, name)
        x = tf.convert_to_tensor(x)
        weights = tf.cast(tf.convert_to_tensor(frequency_weights), x.dtype)
        mean, variance = _of_batch(x, axes, weights)
        return _squeezed(x, axes, keepdims, mean, variance)

    return nn_weighted_moments


def fused_batch_norm(stock: Any, _: Any) -> Any:
    """Does the same for `tf.compat.v1.nn.fused_batch_norm`, used by Keras 2 in training."""

    @functools.wraps(stock)
    def fused(
        x: Any,
        scale: Any,
        offset: Any,
        mean: Any = None,
        variance: Any = None,
        epsilon: float = 0.001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: Any = None,
        exponential_avg_factor: Any = 1.0,
    ) -> Any:
        channels = 1 if data_format.startswith("NC") else tf.convert_to_tensor(x).shape.rank - 1
        axes = [axis for axis in range(tf.convert_to_tensor(x).shape.rank) if axis != channels]
        if not is_training or not _is_over_rows(x, axes):
            return stock(x, scale, offset, mean, variance, epsilon, data_format, is_training, name, exponential_avg_factor)  # fmt: skip
        x = tf.convert_to_tensor(x)
        # Like the kernel, whose statistics of 16-bit numbers are float32.
        wide = tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
        batch_mean, batch_variance = _of_batch(wide, axes, None)
        shape = [1] * x.shape.rank
        shape[channels] = -1
        scale, offset = (tf.reshape(tf.cast(v, wide.dtype), shape) for v in (scale, offset))
        out = tf.nn.batch_normalization(wide, batch_mean, batch_variance, offset, scale, epsilon)
        total = _total_count(wide, axes)
        # Like the kernel, this averages the sample variance.
        correction = total / tf.maximum(total - 1, 1)
        batch_mean, batch_variance = (tf.reshape(v, [-1]) for v in (batch_mean, batch_variance))
        batch_variance *= tf.cast(correction, wide.dtype)
        if mean is not None and not _is_one(exponential_avg_factor):
            factor = tf.cast(exponential_avg_factor, wide.dtype)
            batch_mean = tf.cast(mean, wide.dtype) * (1 - factor) + batch_mean * factor
            batch_variance = tf.cast(variance, wide.dtype) * (1 - factor) + batch_variance * factor
        return tf.cast(out, x.dtype), batch_mean, batch_variance

    return fused


def masked_moments(stock: Any, _: Any) -> Any:
    """Does the same for masked moments of Keras 3's `BatchNormalization`."""

    @functools.wraps(stock)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if mask is None or not _is_over_rows(inputs, self._reduction_axes):
            return stock(self, inputs, mask)
        axes, epsilon = self._reduction_axes, tf.keras.backend.epsilon()
        counts = tf.cast(tf.broadcast_to(mask[..., None], tf.shape(inputs)), inputs.dtype)
        total, count = _totals(
            [tf.reduce_sum(v, axes, keepdims=True) for v in (inputs * counts, counts)]
        )
        mean = total / (count + epsilon)  # Keras's formula
        # A second exchange: deviations are from the mean of all workers' rows.
        squares = tf.square(inputs - mean) * counts
        (total,) = _totals([tf.reduce_sum(squares, axes, keepdims=True)])
        return tf.squeeze(mean), tf.squeeze(total / (count + epsilon))

    return _moments


def synchronized_moments(stock: Any, _: Any) -> Any:
    """Does the same for Keras 3's synchronized statistics."""

    @functools.wraps(stock)
    def compute(x: Any, axes: Any, keepdims: Any) -> Any:
        if not _is_over_rows(x, axes):
            return stock(x, axes, keepdims)
        return tf.nn.moments(x, axes, keepdims=keepdims)  # see `moments`

    return compute


def synchronized_in_2(stock: Any, _: Any) -> Any:
    """Does the same for Keras 2's synchronized statistics."""

    @functools.wraps(stock)
    def calculate(self: Any, x: Any, reduction_axes: Any, keep_dims: Any, mask: Any = None) -> Any:
        if not _is_over_rows(x, reduction_axes):
            return stock(self, x, reduction_axes, keep_dims, mask)
        # It calls `tf.nn.moments` or `weighted_moments`, which are replaced above.
        return self._no_sync_calculate_mean_and_var(x, reduction_axes, keep_dims, mask)

    return calculate


def _of_batch(x: Any, axes: Any, weights: Any) -> tuple[Any, Any]:
    """Returns mean and variance over axes that include the rows, kept as dimensions of 1."""
    if scope.proof is not None:
        return _in_proof(x, axes, weights)
    ones = tf.ones_like(x) if weights is None else tf.broadcast_to(weights, tf.shape(x))
    count = tf.reduce_sum(ones, axes, keepdims=True)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x * ones, axes, keepdims=True), count)
    deviation = tf.reduce_sum(tf.square(x - mean) * ones, axes, keepdims=True)
    means, deviations, counts = _gathered([mean, deviation, count])
    total = tf.reduce_sum(counts, 0)
    whole = tf.math.divide_no_nan(tf.reduce_sum(means * counts, 0), total)
    spread = deviations + counts * tf.square(means - whole)
    return whole, tf.math.divide_no_nan(tf.reduce_sum(spread, 0), total)


def _in_proof(x: Any, axes: Any, weights: Any) -> tuple[Any, Any]:
    """Does the same as `_of_batch`, for a proof, with the sums over workers as its exchanges."""
    exchange = scope.proof.exchange
    ones = tf.ones_like(x) if weights is None else tf.broadcast_to(weights, tf.shape(x))
    count = exchange(tf.reduce_sum(ones, axes, keepdims=True))
    mean = tf.math.divide_no_nan(exchange(tf.reduce_sum(x * ones, axes, keepdims=True)), count)
    squares = tf.reduce_sum(tf.square(x - mean) * ones, axes, keepdims=True)
    return mean, tf.math.divide_no_nan(exchange(squares), count)


def _gathered(values: list[Any]) -> list[Any]:
    """Stacks each worker's values, which have equal shapes, along a new first dimension."""
    region = scope.region
    assert region is not None
    exchange, present = region.exchange, region.division.count > 0
    mean, deviation, count = values
    # A worker without rows has a padding row, which counts for nothing.
    deviation, count = (tf.where(present, v, tf.zeros_like(v)) for v in (deviation, count))
    own = tf.stack([mean, deviation, count])[None]

    @rows.with_gradient
    def gathered(own: Any) -> Any:
        whole = exchange.gather_rows(own)
        whole.set_shape([exchange.size, *own.shape[1:]])

        def gradient(d: Any) -> Any:
            # Every worker normalizes by all parts: the gradient of one is a sum over workers.
            return rows.add(exchange, [d])[0][exchange.rank : exchange.rank + 1]

        return whole, gradient

    found: list[Any] = tf.unstack(gathered(own), axis=1)
    return found


def _totals(parts: list[Any]) -> list[Any]:
    """Sums parts over the rows of all workers, for use by each worker."""
    if scope.proof is not None:
        return [scope.proof.exchange(part) for part in parts]
    region = scope.region
    assert region is not None
    present = tf.cast(region.division.count > 0, parts[0].dtype)  # 0 for a padding row
    return rows.spread(region.exchange, rows.add(region.exchange, [p * present for p in parts]))


def _total_count(x: Any, axes: Any) -> Any:
    """Returns the number of values of the batch in a statistic, as a float64 scalar."""
    own = 1
    for axis in axes:
        if axis:  # the rows, along axis 0, are counted for all workers below
            own *= tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
    if scope.proof is not None:
        return scope.proof.exchange(tf.cast(own * x.shape[0], tf.float64))
    assert scope.region is not None
    # `x` may have several rows for each row of the batch.
    per_row = tf.shape(x)[0] // scope.region.division.length
    return tf.cast(own * per_row * scope.region.division.n, tf.float64)


def _squeezed(x: Any, axes: Any, keepdims: bool, *values: Any) -> tuple[Any, ...]:
    if keepdims:
        return values
    axes = [int(axis) % x.shape.rank for axis in tf.nest.flatten(axes)]
    return tuple(tf.squeeze(value, axes) for value in values)


def _is_one(value: Any) -> bool:
    return not tf.is_tensor(value) and value == 1.0
