"""Tells the user of a `tf.function` that is traced again and again, and what to change.

Tracing, and compiling with XLA, takes as long as hundreds of steps. TensorFlow warns of it, but not
of its cause. This looks at the arguments of the calls that led to a new trace.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import keras_common
from nanotf.console import logger

MANY = 5  # traces for one cause; a full and a short last batch need 2, training and testing 4

_RECORD = "_nanotf_traces"  # attribute of a `tf.function`


@dataclasses.dataclass
class _Traces:
    """Traces of one function."""

    count: int = 0  # after the last call
    # The Python numbers, and below the tensors' shapes, in calls that led to a trace.
    numbers: set[Any] = dataclasses.field(default_factory=set)
    shapes: set[Any] = dataclasses.field(default_factory=set)
    told: bool = False  # whether the user knows


def called(function: Any, args: Any, kwargs: Any) -> None:
    """Logs one line, once for each function, if its calls are traced too often.

    Args:
        function: a `tf.function` that was called eagerly just now.
        args, kwargs: the call's arguments.
    """
    traces = vars(function).setdefault(_RECORD, _Traces())
    count = function.experimental_get_tracing_count()
    if traces.told or count <= traces.count:
        return
    traces.count = count
    leaves = tf.nest.flatten((args, kwargs))
    traces.numbers.add(tuple(x for x in leaves if _is_number(x)))
    traces.shapes.add(tuple(tuple(x.shape) for x in leaves if _has_shape(x)))
    advice = _advice(traces)
    # The user cannot change how Keras calls its own functions.
    if advice and not keras_common.is_keras_own(function.python_function):
        traces.told = True
        logger.warning("%s was traced %d times. %s", _name(function), count, advice)


def _advice(traces: _Traces) -> str:
    if len(traces.numbers) >= MANY:
        return (
            "It is called with Python numbers that change, and each number makes a new graph. "
            "Pass tensors, such as tf.constant(step)."
        )
    if len(traces.shapes) >= MANY:
        return (
            "It is called with tensors of shapes that change, and each shape makes a new graph. "
            "Give all batches one shape: nanotf.data.pad_batches, batch(drop_remainder=True), "
            "a tokenizer's padding='max_length'; or pass reduce_retracing=True to tf.function."
        )
    return ""


def _is_number(value: Any) -> bool:
    # NumPy's numbers become tensors.
    # A bool makes two graphs at most.
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.generic))


def _has_shape(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank is not None


def _name(function: Any) -> str:
    return str(getattr(function.python_function, "__name__", "A tf.function"))
