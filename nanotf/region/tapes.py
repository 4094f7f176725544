"""Gradients with respect to a layer's outputs.

In one process, code outside and inside a layer uses the same tensor. In a region, the tensor
inside has the worker's own rows, and the tensor outside was joined from them. So the gradient is
taken with respect to the own rows, since all paths lead through them, and then joined.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from nanotf.compat import eager_context
from nanotf.region import scope
from nanotf.region.rows import rows_of


def differentiating(stock: Any, _: Any) -> Any:
    """Makes `tf.GradientTape.gradient` differentiate by own rows; see `overrides`."""

    @functools.wraps(stock)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        flat = tf.nest.flatten(sources)
        joined = [rows_of(source) for source in flat]
        if not any(joined):
            return stock(self, target, sources, *args, **kwargs)
        inner = [source if of is None else of.own for source, of in zip(flat, joined, strict=True)]
        found = stock(self, target, inner, *args, **kwargs)
        whole = [
            value if of is None or value is None else of.division.join(value, of.factor)
            for value, of in zip(found, joined, strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, whole)

    return gradient


def watching(stock: Any, _: Any) -> Any:
    """Makes `tf.GradientTape.watch` also watch the own rows that a tensor was joined from."""

    @functools.wraps(stock)
    def watch(self: Any, tensor: Any) -> None:
        stock(self, tensor)
        for whole in tf.nest.flatten(tensor):
            joined = rows_of(whole)
            if joined is not None:
                stock(self, joined.own)
                # A tape that did not watch the rows has not recorded the join.
                eager_context.record(
                    "join",
                    [whole],
                    [joined.own],
                    lambda d, of=joined: [of.division.cut(d, of.factor)],
                )

    return watch


def without_vectorizing(stock: Any, _: Any) -> Any:
    """Makes Jacobians in graphs loop over rows: exchanges cannot be vectorized."""

    @functools.wraps(stock)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if scope.exchange is not None and not tf.executing_eagerly():
            kwargs["experimental_use_pfor"] = False
        return stock(*args, **kwargs)

    return jacobian
