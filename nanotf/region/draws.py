"""Random numbers inside of a region: drawn for the whole batch, of which a worker takes its rows.

So dropout and noise are those of one process.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.region import scope


def drawing(stock: Any, _: Any) -> Any:
    """Makes a function that draws numbers of a `shape` draw those of the batch; see `overrides`."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def draw(*args: Any, **kwargs: Any) -> Any:
        region = scope.region
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if scope.trial is not None:
            return scope.trial.draw(bound.arguments["shape"], bound.arguments["dtype"])
        if region is None or region.is_left():
            return stock(*args, **kwargs)
        division, shape = region.division, bound.arguments["shape"]
        known = tf.get_static_value(tf.convert_to_tensor(shape, tf.int32))
        first = None
        if known is not None:
            known = [int(d) for d in np.ravel(known)]
            first = known[0] if known else 0
        if not region.draws_rows(first):
            return stock(*args, **kwargs)
        rest = known[1:] if known is not None else tf.convert_to_tensor(shape, tf.int32)[1:]
        bound.arguments["shape"] = tf.concat([[division.n], rest], 0)
        with scope.entered(None):
            own = division.own(stock(*bound.args, **bound.kwargs))
        if known is not None:
            own.set_shape([division.length if division.is_known else None, *known[1:]])
        region.admit([own])
        return own

    return draw
