"""Hash of everything that decides how long a step takes. It is equal in every process.

Classes, shapes, types and flags count. Names do not: Keras numbers the names that it makes up, and
calls the second model's layers "dense_2" and "dense_3". A class's code and the numbers in its
attributes do not count either: after changing them, clear the cache by `nanotf tune --clear`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

from nanotf.compat import keras_build, keras_compiling, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.machine import topology
from nanotf.machine.processor import read_processor
from nanotf.shipping.objects import user_modules


def key_of(model: Any, specs: Any, batch: int | None, x: Any, used: Any) -> str:
    """Returns a hash of everything that decides the times: model, cores, versions and more.

    Args:
        model: a Keras model, built and compiled.
        specs: of a batch of the data, see `FitData`.
        batch: the rows of a batch; None for those of a dataset.
        x: of `fit`.
        used: plain values that say which cores are used, and how.
    """
    tf = require_tensorflow()
    if batch is None:
        from nanotf.compat import dataset_graphs

        batch = dataset_graphs.batch_size(x)
    return digest_of(
        description_of(model),
        specs,
        batch,
        repr(used),
        repr(topology.describe_machine()),
        read_processor().name,  # machines with equal cores may share the cache file
        tf.__version__,
        tf.keras.Model.__module__.split(".")[0],  # "keras", or "tf_keras" of Keras 2
    )


def digest_of(*parts: Any) -> str:
    """Hashes nested structures of plain values, classes, functions and specs.

    A dict counts by its values, any other object by its class.
    """
    return hashlib.sha256(json.dumps(_plain(parts)).encode()).hexdigest()


def description_of(model: Any) -> Any:
    """Describes a model, for `digest_of`.

    Args:
        model: a Keras model, built and compiled.
    """
    layers = [
        (
            type(layer),
            layer.compute_dtype,
            layer.trainable,
            # Input shapes show the effect of strides and the like in the layer before.
            _without_rows(keras_build.build_config(layer)) if layer.built else None,
        )
        for layer in keras_build.with_layers(model)
    ]
    variables = [(tuple(v.shape), v.dtype) for v in generation().model_variables(model)]
    compiled = keras_compiling.compile_arguments(model)
    optimizers = keras_optimizers.with_inner(keras_optimizers.optimizers_of(model))
    return layers, variables, optimizers, compiled


def _without_rows(shapes: Any) -> Any:
    """Removes the first axis of shapes: a model built by its first batch knows that one's rows."""
    if isinstance(shapes, dict):
        return {name: _without_rows(shape) for name, shape in shapes.items()}
    if not isinstance(shapes, (list, tuple)):
        return shapes
    if all(axis is None or isinstance(axis, int) for axis in shapes):
        return shapes[1:]
    return [_without_rows(shape) for shape in shapes]


def _plain(value: Any) -> Any:
    tf = require_tensorflow()
    if isinstance(value, dict):
        return [_plain(item) for item in value.values()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tf.TypeSpec, tf.TensorShape, tf.DType)):
        return repr(value)
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    if isinstance(named, type):
        # A class that `accelerate` made takes as long as the class behind it.
        named = user_modules.original_class(named)
    return f"{named.__module__}.{named.__qualname__}"
