"""Trains by BigDL-Nano's `fit(num_processes=N)`, in an interpreter that has it.

Its callbacks run in processes that it starts for each call. Epochs are therefore timed as the
difference between a longer and a shorter call.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.models import Model


class ByPeer:
    """The peer. Takes the arguments of `by_fit.ByFit`."""

    def __init__(self, role: str, spec: Model, rank: int, size: int) -> None:
        import tensorflow as tf
        from bigdl.nano.tf.keras import Model as NanoModel

        self.spec = spec
        self.size = size
        self.model: Any = self.spec.compiled(tf.keras, NanoModel)

    def prepare(self, steps: int) -> None:
        """Makes the data of an epoch of `steps` steps."""
        self.x, self.y = self.spec.data(steps * self.spec.batch_size)

    def run(self, steps: int, epochs: int) -> dict:  # type: ignore[type-arg]
        """Trains once for one epoch and once for `1 + epochs`."""
        calls = [[n, self._seconds(steps, n)] for n in (1, 1 + epochs)]
        return {"calls": calls}

    def _seconds(self, steps: int, epochs: int) -> float:
        rows, start = steps * self.spec.batch_size, time.monotonic()
        self.model.fit(
            self.x[:rows],
            self.y[:rows],
            batch_size=self.spec.batch_size,
            epochs=epochs,
            verbose=0,
            num_processes=self.size,
        )
        return time.monotonic() - start
