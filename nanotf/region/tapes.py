"""Gradients with respect to a layer's outputs.

In one process, code outside and inside a layer uses the same tensor. In a region, the tensor
inside has the worker's own rows, and the tensor outside was joined from them. So the gradient is
taken with respect to the own rows, since all paths lead through them, and then joined.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
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


def taking_jacobians(stock: Any, _: Any) -> Any:
    """Makes Jacobians loop over rows: the exchanges in a gradient cannot be vectorized."""

    @functools.wraps(stock)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        with _next_body(scope.exchange is not None):
            return stock(*args, **kwargs)

    return jacobian


def vectorizing(stock: Any, _: Any) -> Any:
    """Runs bodies of `tf.vectorized_map` whole, and loops over those of Jacobians."""

    @functools.wraps(stock)
    def pfor(loop_fn: Any, iters: Any, *args: Any, **kwargs: Any) -> Any:
        loops = _loops.get()
        with _next_body(False):  # a `tf.vectorized_map` in the body is not the Jacobian's
            if loops:
                return _looped(loop_fn, iters)
            with scope.dividing(None):
                return stock(loop_fn, iters, *args, **kwargs)

    return pfor


# Whether the body of a Jacobian is next.
_loops: contextvars.ContextVar[bool] = contextvars.ContextVar("loops", default=False)


@contextlib.contextmanager
def _next_body(loops: bool) -> Iterator[None]:
    token = _loops.set(loops)
    try:
        yield
    finally:
        _loops.reset(token)


def _looped(body: Any, count: Any) -> Any:
    """Returns the stacked results of a body that is traced once, for a tape need not persist."""
    traced = tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
    flat = tf.nest.flatten(traced.structured_outputs)
    is_given = [each is not None for each in flat]
    specs = [tf.TensorSpec(None, each.dtype) for each in flat if each is not None]

    def given(index: Any) -> list[Any]:
        return [each for each in tf.nest.flatten(traced(index)) if each is not None]

    if not specs:
        return traced.structured_outputs
    results = iter(tf.map_fn(given, tf.range(count), fn_output_signature=specs))
    found = [next(results) if each else None for each in is_given]
    return tf.nest.pack_sequence_as(traced.structured_outputs, found)
