"""Runs losses and metrics on the worker's own rows, where their graph shows that rows are apart.

A function of rows commutes with `join`: workers gather one number per row, not a model's outputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_layers
from nanotf.region import ledger, regions, scope
from nanotf.region.proof.verdicts import Subject, verdict_of
from nanotf.region.rows import rows_of
from nanotf.wire.parts import Part


def calling(stock: Any, _: Any) -> Any:
    """Makes `Loss.__call__` run the loss's `call` on the worker's own rows; see `overrides`."""

    @functools.wraps(stock)
    def __call__(self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        # In a region, code has the worker's own rows already.
        if scope.exchange is None or scope.region is not None:
            return stock(self, y_true, y_pred, *args, **kwargs)
        with _replaced(self, "call", _by_rows(self, self.call)):
            return stock(self, y_true, y_pred, *args, **kwargs)

    return __call__


def updating(stock: Any, _: Any) -> Any:
    """Makes `MeanMetricWrapper.update_state` run on the worker's own rows."""

    @functools.wraps(stock)
    def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if scope.exchange is None or scope.region is not None:
            return stock(self, *args, **kwargs)
        with _replaced(self, "_fn", _by_rows(self, self._fn)):
            return stock(self, *args, **kwargs)

    return update_state


def finding_logits(stock: Any, _: Any) -> Any:
    """Makes Keras find the logits behind a joined tensor, as it finds them in one process."""

    @functools.wraps(stock)
    def _get_logits(output: Any, from_logits: Any, *args: Any) -> Any:
        joined = rows_of(output)
        if joined is None or keras_layers.activation_behind(joined.own) is None:
            return stock(output, from_logits, *args)
        own, from_logits = stock(joined.own, from_logits, *args)
        if own is joined.own:  # no logits are behind it
            return output, from_logits
        return joined.division.join(own, joined.factor), from_logits

    return _get_logits


def noting_call(stock: Any, _: Any) -> Any:
    """Makes Keras 2's losses of `compile` record that a step has used them."""

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._nanotf_called = True
        return stock(self, *args, **kwargs)

    return call


def _by_rows(owner: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of targets and predictions that uses the worker's own rows if these do."""
    # `of_rows` is not converted, so AutoGraph would not reach the function that it calls.
    function = keras_layers.converted_as_here(function)

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def of_rows(y_true: Any, y_pred: Any, **options: Any) -> Any:
        joined = rows_of(y_pred)
        if joined is None or joined.factor != 1 or not regions.is_data(y_true):
            return function(y_true, y_pred, **options)
        division = joined.division
        y_true = tf.convert_to_tensor(y_true)
        if not division.has_rows(y_true):
            return function(y_true, y_pred, **options)
        subject = Subject(owner, lambda *a, **k: (function(*a, **k), {}), type(owner).__name__)
        verdict = verdict_of(subject, (y_true, y_pred), options, division, regions.is_data)
        # Outside a region nothing sums gradients of variables, draws rows or adds changes.
        others = (verdict.variables, verdict.assigned, verdict.draws, verdict.statistics)
        why = verdict.whole
        if verdict.factors != (1,):
            why = why or "it returns no values of rows"
        if verdict.reads_behind or any(others):
            why = why or "it uses variables, random numbers or tensors that are not its arguments"
        ledger.note(owner, Part(subject.name, not why, why, verdict.operations))
        if why:
            return function(y_true, y_pred, **options)
        own = function(division.take(y_true), joined.own, **options)
        values = division.join(own)
        if keras_layers.mask_of(own) is not None:
            keras_layers.set_mask(values, division.join(keras_layers.mask_of(own)))
        return values

    found: Callable[..., Any] = of_rows
    return found


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another attribute in this context, past Keras's tracking of attributes."""
    is_own, before = name in vars(owner), getattr(owner, name)  # a method is in the class
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)
