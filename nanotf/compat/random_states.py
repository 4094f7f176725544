"""The states of Python's and NumPy's random number generators in this process.

Users seed them once (`tf.keras.utils.set_random_seed`) and then expect the numbers that one
process would draw. So nanotf's own work must not use any up.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np

States = tuple[Any, Any]  # of `random`, of `numpy.random`


def capture() -> States:
    """Returns the states of Python's and NumPy's global generators, ready to pickle."""
    return random.getstate(), np.random.get_state()


def restore(states: States) -> None:
    """Restores the generators to the states that `capture` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def seed(key: bytes) -> None:
    """Sets both generators to a state that depends on a key of 32 bytes."""
    random.seed(key)
    np.random.seed(np.frombuffer(key, np.uint32))


class LateRandom:
    """Does what `random.Random(seed)` does, which takes 5 us, only when it is first used."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @functools.cached_property
    def _made(self) -> random.Random:
        return random.Random(self._seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)
