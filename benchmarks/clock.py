"""The clock that every contestant trains with. Runs in the contestants' processes."""

from __future__ import annotations

import time
from typing import Any


def make_clock(keras: Any) -> Any:
    """A Keras callback that notes when epochs and steps end.

    It tells nanotf that workers need not wait for it; see the top of the package.

    Attributes of what is returned:
        ends: list of float, `time.monotonic()` at the end of each epoch.
        steps: list of `[epoch, step, time]`, of those steps whose end was reported.
    """

    class Clock(keras.callbacks.History):  # type: ignore[misc]
        nanotf_needs = "progress"

        def __init__(self) -> None:
            super().__init__()
            self.ends: list = []  # type: ignore[type-arg]
            self.steps: list = []  # type: ignore[type-arg]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps.append([len(self.ends), batch, time.monotonic()])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            self.ends.append(time.monotonic())

    return Clock()
