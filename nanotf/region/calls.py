"""What a region changes in the calls that its code, and code around it, makes."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from nanotf.region import scope
from nanotf.region.regions import divide


def calling_layers(stock: Any, _: Any) -> Any:
    """Makes `Layer.__call__` divide the outermost call; see `overrides`.

    Not inside of `strategy.run()`, whose replicas have rows of their own.
    """

    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = scope.exchange is not None and scope.region is None
        if (
            not outermost
            or tf.distribute.has_strategy()
            or isinstance(self, tf.keras.metrics.Metric)
        ):
            return stock(self, *args, **kwargs)
        return divide(self, stock, args, kwargs)

    return __call__


def calling_functions(stock: Any, _: Any) -> Any:
    """Makes a `tf.function` that a region's code calls run as part of that code.

    A graph that it was traced into elsewhere knows nothing of the region.
    """

    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if scope.region is None and scope.trial is None:
            return stock(self, *args, **kwargs)
        autograph: Any = tf.__internal__.autograph
        python = autograph.tf_convert(self.python_function, autograph.control_status_ctx())
        return python(*args, **kwargs)

    return __call__


def tracing_pipelines(stock: Any, _: Any) -> Any:
    """Makes functions that a `tf.data.Dataset` calls run undivided: each worker calls them alone."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with scope.dividing(None), scope.entered(None):
            stock(self, *args, **kwargs)

    return __init__


def making_operations(stock: Any, _: Any) -> Any:
    """Makes operations of a region use tensors of outside through `spread`."""

    @functools.wraps(stock)
    def _create_op_internal(self: Any, op_type: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        region = scope.region
        if region is None or region.graph is not self or region.recomputes:
            return stock(self, op_type, inputs, *args, **kwargs)
        inputs = [region.inside(tensor) for tensor in inputs]
        op = stock(self, op_type, inputs, *args, **kwargs)
        region.admit(op.outputs)
        return op

    return _create_op_internal


def recomputing(stock: Any, _: Any) -> Any:
    """Makes gradient functions of a region's code, `tf.recompute_grad`'s, run as part of it.

    They use variables as they are: what they return for them goes the way of the region's.
    """

    @functools.wraps(stock)
    def decorate(f: Any, args: Any, kwargs: Any) -> Any:
        region = scope.region
        if region is None:
            return stock(f, args, kwargs)

        def function(*a: Any, **k: Any) -> Any:
            result, gradient = f(*a, **k)

            def run(*d: Any, **variables: Any) -> Any:
                before, region.recomputes = region.recomputes, True
                try:
                    with scope.entered(region):
                        return gradient(*d, **variables)
                finally:
                    region.recomputes = before

            return result, run

        function.__name__ = getattr(f, "__name__", "function")
        return stock(function, args, kwargs)

    return decorate
