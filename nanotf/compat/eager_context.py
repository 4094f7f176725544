"""TensorFlow's own random numbers in eager code (seen alike in 2.14 to 2.21).

| name | why |
| --- | --- |
| `tensorflow.python.eager.context.context()._seed`, `Graph.seed` | the seed of `tf.random.set_seed`, which cannot be read, nor set for a moment, without setting all random numbers anew |
| `tensorflow.python.eager.context.context()._rng` | after `tf.random.set_seed`, the generator of the seeds of eager operations; TensorFlow can set it anew, and cannot say where it stands |
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def seeds_of_operations() -> random.Random | None:
    """The generator that gives eager operations their seeds; None if no seed was set."""
    found: random.Random | None = getattr(context.context(), "_rng", None)
    return found


def global_seed() -> int | None:
    """What was given to `tf.random.set_seed`; None if nothing was."""
    found: int | None = context.global_seed()
    return found


@contextlib.contextmanager
def with_global_seed(seed: int | None) -> Iterator[None]:
    """In this context `seed` is what was given to `tf.random.set_seed`, for datasets' seeds."""
    places: list[tuple[Any, str]] = [(context.context(), "_seed")]
    if not tf.executing_eagerly():
        places = [(tf.compat.v1.get_default_graph(), "seed")]
    before = [getattr(place, name) for place, name in places]
    try:
        for place, name in places:
            setattr(place, name, seed)
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)
