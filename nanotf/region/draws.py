"""Random numbers inside a region: the worker's rows of the numbers that one process draws.

So dropout and noise are the same as in one process. With a counter-based generator (Philox: Salmon
et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) a worker skips to its own rows and
draws only these. With other generators it draws all rows and takes its own.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.region import scope


def drawing(stock: Any, _: Any) -> Any:
    """Makes a random function draw the same numbers as for the whole batch; see `overrides`."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def draw(*args: Any, **kwargs: Any) -> Any:
        region = scope.region
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if scope.proof is not None:
            drawn = stock(*args, **kwargs)
            others = [value for name, value in bound.arguments.items() if name in _LIMITS]
            scope.proof.note_draw(drawn, others)
            return drawn
        if region is None or region.is_left():
            return stock(*args, **kwargs)
        division, shape = region.division, bound.arguments["shape"]
        known = tf.get_static_value(tf.convert_to_tensor(shape, tf.int32))
        if not region.draws_rows():  # takes the proof's note of this draw, in order
            return stock(*args, **kwargs)
        if known is not None:
            known = [int(d) for d in np.ravel(known)]
        rest = tf.convert_to_tensor(shape, tf.int32)[1:]
        counts = _counts(stock.__name__, bound.arguments) and not scope.compiled
        with scope.entered(None):
            run = _own_rows if counts else _of_all_rows
            own = run(stock, bound, division, rest)
        if known is not None:
            own.set_shape([division.length if division.is_known else None, *known[1:]])
        region.admit([own])  # made outside, but own rows: not to be spread
        return own

    return draw


_LIMITS = ("mean", "stddev", "minval", "maxval")  # may be tensors, with a number for each row

# Counts that the generator of the current draw skips.
_skipped: contextvars.ContextVar[Any] = contextvars.ContextVar("skipped", default=None)


def keying(stock: Any, _: Any) -> Any:
    """Makes the generator of stateless random numbers skip counts; see `overrides`."""

    @functools.wraps(stock)
    def get_key_counter_alg(seed: Any, alg: Any) -> Any:
        key, counter, alg = stock(seed, alg)
        if (skipped := _skipped.get()) is not None:
            # Philox counts with 128 bits; the low half comes first.
            counter += tf.stack([tf.cast(skipped, tf.uint64), tf.constant(0, tf.uint64)])
        return key, counter, alg

    return get_key_counter_alg


def _counts(name: str, arguments: dict[str, Any]) -> bool:
    """Returns True for a counter-based generator with equally many numbers per count.

    TensorFlow chooses Philox on CPUs.
    """
    # Truncated normal numbers are drawn until they fit: a number takes more counts.
    kinds = ("stateless_random_uniform", "stateless_random_normal")
    chosen = arguments.get("alg") in ("auto_select", "philox")
    return name in kinds and chosen and bool(tf.as_dtype(arguments["dtype"]).is_floating)


def _own_rows(stock: Any, bound: Any, division: Any, rest: Any) -> Any:
    # Philox makes 128 bits from each count; a number takes 32 or 64 of them.
    each = 2 if tf.as_dtype(bound.arguments["dtype"]) == tf.float64 else 4
    row = tf.reduce_prod(tf.cast(rest, tf.int64))
    begin = tf.cast(division.start, tf.int64) * row
    before = begin % each  # numbers of the first count that belong to rows before
    count = tf.cast(division.length, tf.int64) * row
    bound.arguments["shape"] = (before + count)[None]
    token = _skipped.set(begin // each)
    try:
        found = stock(*bound.args, **bound.kwargs)[before:]
    finally:
        _skipped.reset(token)
    return tf.reshape(found, tf.concat([[division.length], rest], 0))


def _of_all_rows(stock: Any, bound: Any, division: Any, rest: Any) -> Any:
    bound.arguments["shape"] = tf.concat([[division.n], rest], 0)
    return division.own(stock(*bound.args, **bound.kwargs))
