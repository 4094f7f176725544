"""Lets all ranks skip the step that one of them must skip, when the loss is scaled.

A `LossScaleOptimizer` skips a step whose gradients overflow. Where the optimizer in it reduces
gradients over ranks, it looks at those of its own rank: a rank that skips would be missed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from nanotf.ranks import this_rank
from nanotf.region.strategy import WorkerStrategy

REDUCES = "_nanotf_reducing"  # an attribute of optimizers that reduce gradients over ranks


def _sum_over_ranks(inner: Any) -> Callable[[Any], Any] | None:
    """Returns what sums a tensor over the ranks that make the step together; None for one rank."""
    if this_rank.place().size == 1:
        return None
    strategy = tf.distribute.get_strategy()
    # It reduces gradients itself, whatever the optimizer; only Horovod's have `REDUCES`.
    if isinstance(strategy, WorkerStrategy):
        return lambda tensor: strategy.sum_dense([tensor])[0]
    if not hasattr(inner, REDUCES):
        return None
    return lambda tensor: this_rank.group().all_reduce(tensor, this_rank.keys().next())


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)


def _alike(grads: list[Any], total: Callable[[Any], Any]) -> list[Any]:
    """Puts a NaN into a gradient where those of another rank are not finite."""
    given = [place for place, grad in enumerate(grads) if grad is not None]
    if not given:
        return grads
    checks = [tf.reduce_all(tf.math.is_finite(_values(grads[place]))) for place in given]
    overflows = total(tf.cast(~tf.reduce_all(checks), tf.float32)) > 0
    # A dense one if there is one: of an embedding, this rank's rows may be none.
    place = min(given, key=lambda each: isinstance(grads[each], tf.IndexedSlices))
    first = grads[place]
    nan = tf.constant(float("nan"), _values(first).dtype)
    # One is enough: Keras skips a step if any gradient has a value that is not finite.
    if isinstance(first, tf.IndexedSlices):
        row = tf.concat([[tf.cast(overflows, tf.int32)], tf.shape(first.values)[1:]], 0)
        indices = tf.zeros(row[:1], first.indices.dtype)
        changed: Any = tf.IndexedSlices(
            tf.concat([first.values, tf.fill(row, nan)], 0),
            tf.concat([first.indices, indices], 0),
            first.dense_shape,
        )
    else:
        changed = tf.where(overflows, nan, _values(first))
    return [*grads[:place], changed, *grads[place + 1 :]]


@tf.autograph.experimental.do_not_convert
def _agreed(optimizer: Any, grads: Any) -> list[Any]:
    total = _sum_over_ranks(optimizer.inner_optimizer)
    return list(grads) if total is None else _alike(list(grads), total)


def applying(stock: Any, _: Any) -> Any:
    """Changes `LossScaleOptimizer.apply` of Keras 3."""

    @functools.wraps(stock)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return stock(self, _agreed(self, grads), trainable_variables)

    return apply


def applying_pairs(stock: Any, _: Any) -> Any:
    """Changes `LossScaleOptimizer.apply_gradients` of Keras 2."""

    @functools.wraps(stock)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads, variables = map(list, zip(*grads_and_vars, strict=True))
        pairs = list(zip(_agreed(self, grads), variables, strict=True))
        return stock(self, pairs, *args, **kwargs)

    return apply_gradients
