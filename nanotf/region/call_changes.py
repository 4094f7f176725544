"""Changes that a region makes to calls in its code and in the code around it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from nanotf.compat import distribute, functions, keras_common
from nanotf.errors import NanoError
from nanotf.region import retracing, scope
from nanotf.region.proof import part_proofs
from nanotf.region.regions import divide


def calling_layers(stock: Any, _: Any) -> Any:
    """Makes `Layer.__call__` divide the outermost call; see `overrides`.

    Calls inside `tf.distribute.Strategy.run()` are not divided: its replicas have their own rows.
    """

    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if scope.proof is not None:
            return part_proofs.call(scope.proof, self, stock, args, kwargs)
        outermost = scope.exchange is not None and scope.region is None
        if (
            not outermost
            or tf.distribute.has_strategy()
            # In Keras 2 a metric is a layer.
            or isinstance(self, tf.keras.metrics.Metric)
        ):
            return stock(self, *args, **kwargs)
        return divide(self, stock, args, kwargs)

    return __call__


def calling_functions(stock: Any, _: Any) -> Any:
    """Makes a `tf.function` that a region's code calls run as part of that code.

    A graph that it was traced into elsewhere is unaware of the region. Over gRPC this also applies
    in a graph's branches and loops: there TensorFlow does not feed the keys of a function's
    collectives. If the user compiles the function with XLA, its divided calls are compiled, and
    what is between them is not.
    """

    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_apart = scope.exchange is None or scope.exchange.feeds_branches
        is_apart = is_apart or not distribute.in_branch()
        if scope.region is None and scope.proof is None and is_apart:
            if scope.exchange is not None and not tf.distribute.has_strategy():
                self = functions.dividing_version(self)  # XLA cannot compile exchanges
            with scope.compiling() if functions.compiles(self) else contextlib.nullcontext():
                result = stock(self, *args, **kwargs)
            if scope.exchange is not None and tf.executing_eagerly():
                retracing.called(self, args, kwargs)
            return result
        # As a part of its caller's code, which AutoGraph may be converting.
        autograph: Any = tf.__internal__.autograph
        python = autograph.tf_convert(self.python_function, autograph.control_status_ctx())
        return python(*args, **kwargs)

    return __call__


def tracing_pipelines(stock: Any, _: Any) -> Any:
    """Makes functions of a `tf.data.Dataset` run undivided: each worker calls them alone."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with scope.dividing(None), scope.entered(None):
            stock(self, *args, **kwargs)

    return __init__


def looping(stock: Any, _: Any) -> Any:
    """Turns a graph's loop over a dataset into a loop over its iterator.

    AutoGraph would make it part of the pipeline, which each worker runs alone.
    """

    @functools.wraps(stock)
    def for_stmt(iter_: Any, *args: Any) -> Any:
        if scope.exchange is not None and isinstance(iter_, tf.data.Dataset):
            iter_ = iter(iter_)
        return stock(iter_, *args)

    return for_stmt


def refusing(stock: Any, strategy: Any) -> Any:
    """Makes Keras's own loops reject calls that are impossible in a `@nano` function."""
    name = stock.__name__

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if scope.exchange is None:
            return stock(self, *args, **kwargs)
        # An argument of nanotf's methods, which Keras's do not take.
        if kwargs.pop("num_processes", None) not in (None, 1):
            raise NanoError(
                "A worker cannot start workers of its own. Received: a call of "
                f"{name}(num_processes=...) inside a @nano function. Remove the argument, or "
                "call it outside."
            )
        if self.distribute_strategy is strategy:
            raise NanoError(
                "Inside a @nano function Keras's own loops take only models made outside "
                f"the strategy's scope. Received: a call of {name}() of the model {self.name!r}. "
                "Make it without `with strategy.scope()`."
            )
        return stock(self, *args, **kwargs)

    return method


def applying(stock: Any, strategy: Any) -> Any:
    """Makes Keras 3's `apply`, in a strategy's `run()`, reject variables made outside the strategy."""

    @functools.wraps(stock)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        _check_under_strategy(strategy, variables)
        return stock(self, grads, trainable_variables)

    return apply


def applying_pairs(stock: Any, strategy: Any) -> Any:
    """Does the same for Keras 2's `apply_gradients`."""

    @functools.wraps(stock)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        _check_under_strategy(strategy, [variable for _, variable in pairs])
        return stock(self, pairs, *args, **kwargs)

    return apply_gradients


def _check_under_strategy(strategy: Any, variables: Any) -> None:
    if scope.exchange is None or tf.distribute.get_strategy() is not strategy:
        return
    for variable in map(keras_common.tf_variable, variables):
        if not isinstance(variable, tf.distribute.DistributedValues):
            raise NanoError(
                "Under strategy.run() an optimizer trains variables of the strategy. Received: "
                f"{variable.name!r}, made outside its scope. Make the model and the optimizer "
                "inside the @nano function, in `with strategy.scope()`; or call the step "
                "without strategy.run(): nanotf divides its calls anyway."
            )


def making_operations(stock: Any, _: Any) -> Any:
    """Makes operations of a region use tensors from outside through `spread`."""

    @functools.wraps(stock)
    def _create_op_internal(self: Any, op_type: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        region = scope.region
        # A loop or branch has its own graph, and gets tensors by an operation of region.graph.
        if region is None or region.graph is not self or region.recomputes:
            return stock(self, op_type, inputs, *args, **kwargs)
        inputs = [region.inside(tensor) for tensor in inputs]
        op = stock(self, op_type, inputs, *args, **kwargs)
        region.admit(op.outputs)
        return op

    return _create_op_internal


def recomputing(stock: Any, _: Any) -> Any:
    """Makes gradient functions of a region's code, as of `tf.recompute_grad`, run as part of it.

    Gradient functions use variables directly. The gradients that they return for variables are
    handled like the region's.
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
