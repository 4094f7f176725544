"""TensorFlow's own random numbers in eager code (seen alike in 2.14 to 2.21).

| name | why |
| --- | --- |
| `tensorflow.python.eager.context.context()._rng` | after `tf.random.set_seed`, the generator of the seeds of eager operations; TensorFlow can set it anew, and cannot say where it stands |
"""

from __future__ import annotations

import random

from tensorflow.python.eager import context


def seeds_of_operations() -> random.Random | None:
    """The generator that gives eager operations their seeds; None if no seed was set."""
    found: random.Random | None = getattr(context.context(), "_rng", None)
    return found
