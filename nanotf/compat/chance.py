"""The state of all random number generators: Python's, NumPy's, TensorFlow's and Keras's."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from nanotf.compat import eager_context, random_states
from nanotf.compat.generation import generation


class Chance(NamedTuple):
    """The state of all of a process's random number generators."""

    states: random_states.States
    tensorflow: tuple[int, Any] | None  # see `eager_context.seeds`
    keras: Any  # see `Generation.capture_seeds`

    @classmethod
    def capture(cls) -> Chance:
        """Captures the state of this process."""
        return cls(random_states.capture(), eager_context.seeds(), generation().capture_seeds())

    def restore(self) -> None:
        """Restores the state in this process."""
        generation().restore_seeds(self.keras)
        eager_context.restore_seeds(self.tensorflow)
        random_states.restore(self.states)


def seed(number: int) -> None:
    """Does what `tf.keras.utils.set_random_seed` does, in half of the time."""
    generation().seed(number)
    random.seed(number)
    np.random.seed(number)
    eager_context.seed(number, is_new=False)  # drops cached kernels, as TensorFlow does
