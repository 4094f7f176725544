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
from nanotf.shipping.objects import user_modules


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
            keras_build.build_config(layer) if layer.built else None,
        )
        for layer in keras_build.with_layers(model)
    ]
    variables = [(tuple(v.shape), v.dtype) for v in generation().model_variables(model)]
    compiled = keras_compiling.compile_arguments(model)
    optimizers = keras_optimizers.with_inner(keras_optimizers.optimizers_of(model))
    return layers, variables, optimizers, compiled


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
