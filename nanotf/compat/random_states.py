"""Where the random numbers of this process stand: Python's, NumPy's, TensorFlow's and Keras's.

Users set them once (`tf.keras.utils.set_random_seed`) and expect what one process would draw
from there on; so what nanotf does on its own account may not use any up.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from nanotf.compat import eager_context
from nanotf.compat.generation import generation

States = tuple[Any, Any]  # of `random`, of `numpy.random`


class Chance(NamedTuple):
    """Where all of a process's random numbers stand.

    Args:
        states: `States`.
        tensorflow: tuple or None, see `eager_context.seeds`.
        keras: object or None, see `Generation.taken_seeds`.
    """

    states: States
    tensorflow: tuple[int, Any] | None
    keras: Any

    @classmethod
    def taken(cls) -> Chance:
        """That of this process."""
        return cls(take(), eager_context.seeds(), generation().taken_seeds())

    def put(self) -> None:
        """Makes it that of this process."""
        generation().put_seeds(self.keras)
        eager_context.put_seeds(self.tensorflow)
        put(self.states)


def take() -> States:
    """The states of Python's and NumPy's global generators; to be pickled."""
    return random.getstate(), np.random.get_state()


def put(states: States) -> None:
    """Puts the generators where they were at `take`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
