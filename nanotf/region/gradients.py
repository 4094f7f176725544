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

from nanotf.region import optimizers
from nanotf.region.share import Share, Worker


def follow_share(stock: Any, worker: Worker) -> Any:
    """Makes `tf.GradientTape.gradient` follow the share, see `overrides`."""
    share = worker.share

    @functools.wraps(stock)
    def gradient(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kw: Any
    ) -> Any:
        of = tf.nest.flatten(sources)
        if share.in_own_step and share.current is not None and any(map(_is_variable, of)):
            output_gradients = _weighed_rows(target, output_gradients, share)
        found = stock(self, target, sources, output_gradients, *args, **kw)
        # In branches, and in functions inside of a step's, optimizers sum them.
        if not share.in_own_graph():
            return found
        flat = tf.nest.flatten(found)
        places = [i for i, g in enumerate(flat) if g is not None and _is_variable(of[i])]
        for place, whole in zip(places, _whole([flat[i] for i in places], share), strict=True):
            flat[place] = whole
            share.note_whole(whole)
        return tf.nest.pack_sequence_as(found, flat)

    return gradient


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign")


def _weighed_rows(target: Any, given: Any, share: Share) -> Any:
    """The `output_gradients` for targets of which some have a value for each row, a loss of each.

    TensorFlow differentiates the sum of their rows. The share, which weighs the gradient of a mean
    over rows, is taken out of it. Whether a target has rows the workers agree upon, where they can.
    """
    targets = tf.nest.flatten(target)
    places = [i for i, value in enumerate(targets) if _may_have_rows(value, share)]
    if not places:
        return given
    against = tf.constant([not share.may_be_rows(targets[i]) for i in places], tf.float64)
    if share.in_own_graph():
        context = tf.distribute.get_replica_context()
        against = context.all_reduce(tf.distribute.ReduceOp.SUM, against)
    seeds = [None] * len(targets) if given is None else tf.nest.flatten(given)
    seeds = [tf.ones_like(t) if s is None else s for t, s in zip(targets, seeds, strict=True)]
    for number, place in enumerate(places):
        seed = tf.convert_to_tensor(seeds[place])
        seeds[place] = tf.where(against[number] > 0, seed, share.undone(seed))
    return seeds


def _may_have_rows(value: Any, share: Share) -> bool:
    is_tensor = isinstance(value, tf.Tensor) and not share.is_whole(value)
    return is_tensor and value.dtype.is_floating and bool(value.shape.rank)


def _whole(gradients: list[Any], share: Share) -> list[Any]:
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]

    @tf.custom_gradient
    def of_dense(*own: Any) -> Any:
        # A gradient of gradients: what another worker's rows add to it, that worker adds.
        return optimizers.weighed_sum(own, share), lambda *upstream: upstream

    found = iter(of_dense(*dense) if dense else ())
    summed = iter(optimizers.weighed_sum(sparse, share) if sparse else ())
    return [next(summed if isinstance(g, tf.IndexedSlices) else found) for g in gradients]
