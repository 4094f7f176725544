"""Tells how layers were built, and builds them by a symbolic call.

| name | generation, versions seen | why |
| --- | --- | --- |
| `MultiHeadAttention._build_from_signature` | 2; 2.14, 2.15, tf_keras 2.15-2.21 | see `build_config` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from nanotf.compat.keras_layers import layers_below
from nanotf.compat.keras_models import has_call
from nanotf.compat.versions import require_tensorflow

_SIGNATURE = "signature"


def build_config(layer: Any) -> Any:
    """Returns the config by which Keras's build_from_config builds another layer like this one.

    In Keras 2.15 a layer built by `build()` instead of a call does not remember the shape; its
    `input_spec` has it. Keras 2's `MultiHeadAttention` makes its layers from the shapes of its
    inputs in its first call.
    """
    if hasattr(layer, "_build_from_signature"):
        given = layer.get_config()
        shapes = {name: given[f"{name}_shape"] for name in ("query", "value", "key")}
        return None if shapes["query"] is None else {_SIGNATURE: shapes}  # None before a call
    config = layer.get_build_config()
    spec = getattr(layer, "input_spec", None)
    if config or not isinstance(spec, require_tensorflow().keras.layers.InputSpec):
        return config
    shape = [None] * (spec.ndim or spec.min_ndim or 0) if spec.shape is None else [*spec.shape]
    for axis, size in (spec.axes or {}).items():
        shape[axis] = size
    return {"input_shape": tuple(shape)} if shape else config


def with_layers(model: Any) -> list[Any]:
    """Returns a model and the layers below it, in the same order in parent and worker."""
    return [model, *layers_below(model)]


def needs_call(model: Any) -> bool:
    """Returns True if a model must be called before all its variables exist."""
    some_unbuilt = not all(layer.built for layer in layers_below(model))
    if has_call(model):
        return not model.built or (some_unbuilt and not model.variables)
    # Before its layers are built, Keras 2 has no list of variables.
    return some_unbuilt or (not model.built and not model.variables)


def build_symbolically(
    layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, is_data: Callable[[Any], bool]
) -> None:
    """Builds a layer by a call that only computes shapes, if such a call is possible.

    Args:
        layer: a layer that is not built.
        call: the stock `__call__`.
        args, kwargs: arguments of the call that follows.
        is_data: whether a leaf of them is a tensor or array.
    """
    tf = require_tensorflow()

    def symbol(leaf: Any) -> Any:
        if not is_data(leaf):
            return leaf
        sparse, ragged = isinstance(leaf, tf.SparseTensor), isinstance(leaf, tf.RaggedTensor)
        shape, dtype = tuple(leaf.shape[1:]), leaf.dtype
        options = {"sparse": True} if sparse else {"ragged": True} if ragged else {}
        return tf.keras.Input(shape, dtype=tf.as_dtype(dtype), **options)

    args, kwargs = tf.nest.map_structure(symbol, (args, kwargs))
    # The call that follows tells what is wrong.
    with contextlib.suppress(Exception), tf.init_scope():
        call(layer, *args, **kwargs)
