"""The passes over the data that epochs are made of, and the place where a `fit` continues in them.

`steps_per_epoch` need not divide a pass. Keras 2 keeps one iterator over all epochs; Keras 3 makes
one for each pass, and ends the epoch in which the data run out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from nanotf.compat import random_states
from nanotf.compat.generation import generation
from nanotf.parent.reading.shuffle_orders import OrderSeed


@dataclasses.dataclass(frozen=True)
class Resume:
    """The position from which a `fit` continues, in new workers or in a new process."""

    first_epoch: int  # the epoch at which it began
    first_step: int  # the step in that epoch; 0 unless Keras 2's `BackupAndRestore` resumed
    epoch: int  # the epoch to run next
    # When this process began to read that epoch, see `compat.random_states`; None if it did not
    random_states: random_states.States | None
    order_seed: OrderSeed  # of the whole call
    # Steps of that epoch that are complete. Arrays continue with the next one; the batches of other
    # data are read again and dropped, see `orders.FitOrder.passed_steps`.
    step: int = 0

    @property
    def epochs(self) -> int:
        """Returns the number of complete epochs."""
        return self.epoch - self.first_epoch

    def place(self, steps: int, size: int, at_once: int) -> tuple[int, int]:
        """Returns the number of complete passes over the data, and of batches used of the next.

        Args:
            steps: steps per epoch.
            size: batches per pass over the arrays.
            at_once: steps per execution.
        """
        if generation().EACH_PASS_HAS_AN_ITERATOR and (size % steps or steps % at_once):
            # These passes differ in length, and each epoch begins one.
            return self.epochs, self.step
        return divmod(self.epochs * steps - self.first_step + self.step, size)

    def place_of_workers(self, steps: int | None, cardinality: int) -> dict[str, Any]:
        """Returns where workers continue in a dataset: `iterated` and `taken` of their input.

        Args:
            steps: steps per epoch; None if the user does not name them.
            cardinality: the number of batches that the workers' Keras assumes.
        """
        if steps is None:
            each = generation().iterators_per_epoch(cardinality)
            return {"iterated": self.epochs * each}
        if generation().EACH_PASS_HAS_AN_ITERATOR and cardinality > 0:
            # Keras makes one iterator for each pass, which serves several epochs.
            return {"iterated": self.epochs // math.ceil(cardinality / steps)}
        return {"taken": max(0, self.epochs * steps - self.first_step)}


def epochs_cut_short(steps: int, size: int, epochs: int) -> list[bool]:
    """Returns which epochs of Keras 3 end before their last step, since a pass ends.

    Args:
        steps: executions of an epoch.
        size: executions of one pass.
    """
    cut, seen = [], 0
    for _ in range(epochs):
        cut.append(seen + steps > size)
        seen = 0 if cut[-1] else (seen + steps) % size
    return cut
