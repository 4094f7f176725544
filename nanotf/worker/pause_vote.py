"""Lets all ranks pause after the same step when their parent asks them to.

The parent's message reaches the ranks at different steps. So at some steps, the same on all ranks,
they exchange whether it has come. Rank 0 decides how many steps later they ask again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from nanotf.region.rows import Exchange

SECONDS = 0.2  # between two looks; an exchange takes about a thousandth of that
MOST_STEPS = 256


class PauseVote:
    """The steps of a `fit` after which ranks ask each other.

    Args:
        is_asked: returns True if the parent's message has come to this rank.
    """

    def __init__(self, exchange: Exchange, is_asked: Callable[[], bool]) -> None:
        self._exchange = exchange
        self._is_asked = is_asked
        self._interval = 1
        self.begin_epoch(0)

    def begin_epoch(self, made: int) -> None:
        """Begins an epoch of which `made` steps are complete."""
        self._last, self._since = made, time.monotonic()
        self._next = made + 1

    def left(self, made: int) -> int:
        """Returns how many steps later ranks ask each other, after `made` steps."""
        return max(1, self._next - made)

    def is_due(self, made: int) -> bool:
        """Returns True if ranks ask each other after `made` steps."""
        return made >= self._next

    def agree(self, made: int) -> bool:
        """Returns True, on all ranks, if the parent's message has come to any.

        Args:
            made: complete steps of the epoch, for which `is_due`.
        """
        seconds = (time.monotonic() - self._since) / (made - self._last)
        fitting = min(int(SECONDS / max(seconds, 1e-6)), 2 * self._interval, MOST_STEPS)
        row = tf.constant([[float(self._is_asked()), float(max(1, fitting))]], tf.float64)
        ranks = self._exchange.gather_rows(row).numpy()
        # All ranks take rank 0's: each has measured other seconds.
        self._interval = int(ranks[0, 1])
        self._last, self._since = made, time.monotonic()
        self._next = made + self._interval
        return bool(np.any(ranks[:, 0]))
