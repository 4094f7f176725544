"""Calls that XLA compiles: the code inside a divided call is compiled, exchanges are not."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from nanotf.compat import keras_layers
from nanotf.region import scope


def call(layer: Any, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `stock(*args, **kwargs)`, compiled if possible.

    A call is not compiled if it exchanges something, such as statistics of the batch, since XLA has
    no communication between processes. Nor is it if tensors have masks or the layer adds losses: a
    compiled function returns neither.

    Args:
        layer: the layer, in a graph.
        stock: calls the layer.
        args, kwargs: its arguments.
    """
    leaves = tf.nest.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    kept = [(losses, len(losses)) for losses in keras_layers.lists_of_losses(layer)]

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*tensors: Any) -> Any:
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
        out = stock(*inner_args, **inner_kwargs)
        adds = any(len(losses) > count for losses, count in kept)
        if adds or any(keras_layers.mask_of(leaf) is not None for leaf in tf.nest.flatten(out)):
            raise scope.NotCompiled
        return out

    tensors = [leaves[place] for place in places]
    try:
        if any(keras_layers.mask_of(tensor) is not None for tensor in tensors):
            raise scope.NotCompiled
        with scope.compiling(inside=True):
            trace = compiled.get_concrete_function(*tensors)
        return trace(*tensors)
    except scope.NotCompiled:
        # The trace has left tensors of its graph there, which no other graph can use.
        for losses, count in kept:
            del losses[count:]
        return stock(*args, **kwargs)
