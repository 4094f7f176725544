"""Where Python's and NumPy's random numbers stand in this process.

Users set them once (`tf.keras.utils.set_random_seed`) and expect what one process would draw
from there on; so what nanotf does on its own account may not use any up.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

States = tuple[Any, Any]  # of `random`, of `numpy.random`


def capture() -> States:
    """The states of Python's and NumPy's global generators; to be pickled."""
    return random.getstate(), np.random.get_state()


def restore(states: States) -> None:
    """Puts the generators where they were at `capture`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
