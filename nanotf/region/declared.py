"""Layers that the user declares to be apart, `nanotf.by_rows`: compared with a whole call.

A graph does not show what a `py_function` or an operation of another library does with rows. So the
divided call of such a layer, and its gradient, are compared with a call on all rows, at the layer's
first call, its 2nd, 4th, 8th and so on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import eager_context, keras_common
from nanotf.region import recording, scope

_calls: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # made, by layer


def check(
    layer: Any,
    whole: Callable[..., Any],
    divided: Callable[[Any, Any], Any],
    args: Any,
    kwargs: Any,
    differ: Callable[[Any, str, Any, Any, Any], Any] | None = None,
) -> None:
    """Compares a divided call with a whole one, if this call of the layer is one to compare.

    Args:
        whole: takes the call's arguments; calls the layer on all rows.
        divided: takes `args` and `kwargs`; calls the layer on each worker's rows.
        args, kwargs: the call's arguments, of the whole batch.
        differ: takes the layer, the name of a result, a bool tensor, whether it is
            right, and one number of it on all rows and on each worker's; None to raise.

    Raises:
        tf.errors.InvalidArgumentError: They differ. In a graph, its run raises.
    """
    assert_equal = functools.partial(_assert_equal, differ or _raise)
    if layer not in _calls:
        _calls[layer] = eager_context.made_outside(lambda: tf.Variable(0, dtype=tf.int64))
    # A variable, so that a graph counts its runs and not its traces.
    number = _calls[layer].assign_add(1, read_value=True)

    def compare() -> Any:
        state = [v.read_value() for v in map(keras_common.tf_variable, layer.variables)]
        # First, so that an assignment is found before the divided call adds its own.
        with scope.dividing(None):
            expected = _results(layer, lambda: whole(*args, **kwargs), args, kwargs)
        for variable, before in zip(layer.variables, state, strict=True):
            now = keras_common.tf_variable(variable).read_value()
            assert_equal(layer, f"an assignment to {variable.name}", now, before)
        found = _results(layer, lambda: divided(args, kwargs), args, kwargs)
        for (name, here), (_, there) in zip(found, expected, strict=True):
            if (here is None) != (there is None):
                zeros = tf.zeros_like(there if here is None else here)
                here, there = (zeros if v is None else v for v in (here, there))
            if here is not None:
                assert_equal(layer, name, here, there)
        return True

    # At powers of two.
    tf.cond(tf.equal(tf.bitwise.bitwise_and(number, number - 1), 0), compare, lambda: False)


def _results(layer: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Returns pairs of a name and a tensor: outputs, and their gradients for one upstream."""
    leaves = tf.nest.flatten((args, kwargs))
    given = [v for v in leaves if isinstance(v, tf.Tensor) and v.dtype.is_floating]
    trained = list(map(keras_common.tf_variable, layer.trainable_variables))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([*given, *trained])
        outputs = [v for v in tf.nest.flatten(call()) if tf.is_tensor(v)]
    floats = [v for v in outputs if v.dtype.is_floating]
    gradients = tape.gradient(floats, [*given, *trained], [_unlike(v) for v in floats])
    # Dense: a sparse one may name a row several times, and on workers in another order.
    gradients = [v if v is None else tf.convert_to_tensor(v) for v in gradients]
    names = [f"output {place}" for place in range(len(outputs))]
    names += [f"the gradient of argument {place}" for place in range(len(given))]
    names += [f"the gradient of {variable.name}" for variable in layer.trainable_variables]
    return list(zip(names, [*outputs, *gradients], strict=True))


def _unlike(like: Any) -> Any:
    """Returns numbers that are unlike in all rows, as a gradient that arrives at an output."""
    # With ones, a layer that swaps rows would have the right gradients.
    places = tf.range(tf.size(like, tf.int64))
    return tf.reshape(tf.cast(tf.cos(tf.cast(places, tf.float64)), like.dtype), tf.shape(like))


def _epsilon(dtype: Any) -> float:
    if dtype == tf.bfloat16:  # which NumPy does not know
        return 2.0**-7
    return float(np.finfo(dtype.as_numpy_dtype).eps) if dtype.is_floating else 0.0


def _assert_equal(differ: Callable[..., Any], layer: Any, name: str, here: Any, there: Any) -> None:
    """Asserts that tensors are equal but for rounding: the square root of the epsilon.

    It is the epsilon of the dtype in which the layer computes, if that is coarser: with mixed
    precision its variables' gradients have another.
    """
    dtype = here.dtype
    if dtype == tf.string:
        here, there = tf.cast(tf.not_equal(here, there), tf.int32), tf.zeros_like(here, tf.int32)
    dtypes = [dtype, tf.as_dtype(layer.compute_dtype)]
    rounding = max(map(_epsilon, dtypes)) ** 0.5 if dtype.is_floating else 0.0
    here, there = (tf.reshape(tf.cast(v, tf.float64), [-1]) for v in (here, there))
    are_nan = tf.math.is_nan(here) & tf.math.is_nan(there)
    gaps = tf.where(are_nan | tf.equal(here, there), tf.zeros_like(here), tf.abs(here - there))
    finite = tf.where(tf.math.is_finite(there), tf.abs(there), tf.zeros_like(there))
    is_right = gaps <= rounding * tf.reduce_max(tf.concat([finite, [0.0]], 0))
    wrong = tf.concat([tf.where(~is_right)[:, 0], [0]], 0)[0]  # the first, if there is one
    one, other = (tf.concat([v, [0.0]], 0)[wrong] for v in (here, there))
    differ(layer, name, tf.reduce_all(is_right), other, one)


def recorded(layer: Any, name: str, is_right: Any, whole: Any, divided: Any) -> None:
    """Records a difference for `nanotf compare`."""
    # The graph is that of all ranks, which run its collectives in one order; rank 0 writes.
    is_first = scope.exchange is None or not scope.exchange.rank
    note = recording.note_layer(f"{layer.name} ({type(layer).__name__})", name)
    note = note if is_first else lambda *_: None

    def write() -> Any:
        return tf.numpy_function(note, [whole, divided], [], stateful=True)

    tf.cond(is_right, tf.no_op, write)


def _raise(layer: Any, name: str, is_right: Any, whole: Any, divided: Any) -> None:
    tf.debugging.Assert(
        is_right,
        [
            f"nanotf.by_rows({layer.name}) declares that each row of its outputs depends on one row"
            f" of its inputs. Received: {name} has other values on all rows than on each worker's "
            "rows. Leave nanotf.by_rows out, or write nanotf.whole instead. Values:",
            whole,
            divided,
        ],
    )
