"""Runs Keras's own losses and metrics that are functions of rows on the worker's own rows.

A function of rows commutes with `join`: workers gather one number per row, not a model's outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import keras_names
from nanotf.region import scope
from nanotf.region.rows import rows_of


def calling(stock: Any, _: Any) -> Any:
    """Makes `LossFunctionWrapper.call` run on the worker's own rows; see `overrides`."""

    @functools.wraps(stock)
    def call(self: Any, y_true: Any, y_pred: Any) -> Any:
        key = (self.fn, repr(getattr(self, "_fn_kwargs", None)))
        return _by_rows(key, lambda t, p: stock(self, t, p), y_true, y_pred)

    return call


def updating(stock: Any, _: Any) -> Any:
    """Makes `MeanMetricWrapper.update_state` run on the worker's own rows."""

    @functools.wraps(stock)
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        function = self._fn
        if rows_of(y_pred) is None:
            return stock(self, y_true, y_pred, sample_weight)

        @tf.autograph.experimental.do_not_convert
        def of_rows(t: Any, p: Any, **options: Any) -> Any:
            return _by_rows((function, repr(options)), lambda t, p: function(t, p, **options), t, p)

        self._fn = of_rows
        try:
            return stock(self, y_true, y_pred, sample_weight)
        finally:
            self._fn = function

    return update_state


def noting_call(stock: Any, _: Any) -> Any:
    """Makes Keras 2's losses of `compile` record that a step has used them."""

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._nanotf_called = True
        return stock(self, *args, **kwargs)

    return call


_keep_rows: dict[Any, bool] = {}


def _by_rows(key: Any, function: Callable[[Any, Any], Any], y_true: Any, y_pred: Any) -> Any:
    """Calls a function of targets and predictions, on the worker's own rows if these suffice."""
    joined = rows_of(y_pred)
    if joined is None or joined.factor != 1 or not keras_names.is_keras_own(key[0]):
        return function(y_true, y_pred)
    division, y_true = joined.division, tf.convert_to_tensor(y_true)
    if y_true.shape.rank in (0, None) or not division.fits(y_true.shape[0]):
        return function(y_true, y_pred)
    key = (*key, y_true.shape[1:], y_true.dtype, y_pred.shape[1:], y_pred.dtype)
    if key not in _keep_rows:
        with tf.init_scope():
            _keep_rows[key] = _keeps_rows(function, y_true, y_pred)
    if not _keep_rows[key]:
        return function(y_true, y_pred)
    own = joined.own
    return division.join(function(division.take(y_true), own))


def _keeps_rows(function: Callable[[Any, Any], Any], *like: Any) -> bool:
    """Returns True if a Keras function returns one value per row that depends on that row alone.

    Tries targets as numbers and as classes: Keras turns both into floats.
    """
    random = np.random.default_rng(0)
    shapes = [[4, *[2 if d is None else d for d in tensor.shape[1:]]] for tensor in like]
    targets = [random.uniform(0.05, 0.95, shapes[0]), random.integers(0, 2, shapes[0])]
    predictions = random.uniform(0.05, 0.95, shapes[1])
    kinds = targets if like[0].dtype.is_floating else targets[1:]
    dtypes = [tensor.dtype.as_numpy_dtype for tensor in like]
    with scope.dividing(None), scope.entered(None):
        return all(
            _are_apart(function, drawn.astype(dtypes[0]), predictions.astype(dtypes[1]))
            for drawn in kinds
        )


def _are_apart(function: Callable[[Any, Any], Any], *values: Any) -> bool:
    try:
        whole, one, three = (
            np.asarray(function(*[tf.constant(v[a:b]) for v in values]))
            for a, b in ((0, 4), (0, 1), (1, 4))
        )
    except Exception:  # it rejects these numbers; on the whole batch it raises its own error
        return False
    if whole.ndim == 0 or (whole.shape[0], one.shape[:1], three.shape[:1]) != (4, (1,), (3,)):
        return False
    return bool(np.allclose(np.concatenate([one, three]), whole, 1e-3, 1e-4, equal_nan=True))
