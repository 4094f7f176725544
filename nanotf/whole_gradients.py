"""Gradients in steps of the user's are those of the global batch at once.

In those of a `@nano` function, and in a model's own `train_step`.

Whatever the step does with them then, clip them, add them up in variables, print their norms, is
what it is in one process. An optimizer takes them as they are. What has become of them on the way
it weighs by the shares and sums, as it does with gradients of other origin: the shares add up to 1,
so that what is alike on all workers stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_optimizers
from nanotf.share import Share


def install(share: Share) -> None:
    """Makes `tf.GradientTape.gradient` follow the share, in a worker's process."""
    stock = tf.GradientTape.gradient

    @functools.wraps(stock)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, target, sources, *args, **kwargs)
        # Collectives cannot stand in branches, nor in functions inside of a step's.
        if not share.in_own_graph():
            return found
        flat, of = tf.nest.flatten(found), tf.nest.flatten(sources)
        places = [i for i, g in enumerate(flat) if g is not None and hasattr(of[i], "assign")]
        for place, whole in zip(places, _whole([flat[i] for i in places], share), strict=True):
            flat[place] = whole
            share.note_whole(whole)
        return tf.nest.pack_sequence_as(found, flat)

    tf.GradientTape.gradient = gradient


def _whole(gradients: list[Any], share: Share) -> list[Any]:
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]

    @tf.custom_gradient
    def of_dense(*own: Any) -> Any:
        # A gradient of gradients: what another worker's rows add to it, that worker adds.
        return keras_optimizers.weighed_sum(own, share), lambda *upstream: upstream

    found = iter(of_dense(*dense) if dense else ())
    summed = iter(keras_optimizers.weighed_sum(sparse, share) if sparse else ())
    return [next(summed if isinstance(g, tf.IndexedSlices) else found) for g in gradients]
