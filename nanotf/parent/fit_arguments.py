"""The checked arguments of one `fit`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from nanotf.compat import keras_runs
from nanotf.errors import UndividedError


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """The arguments of Keras's `fit`, with Keras's defaults."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: Any = True
    class_weight: Any = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1
    # Keras 2's arguments for generators and `Sequence`s; in Keras 3 a `PyDataset` has them.
    max_queue_size: int = 10
    workers: int = 1
    use_multiprocessing: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FitArguments:
        """Makes an object from the arguments of a call.

        Args:
            given: mapping of str to object, the arguments of Keras's `fit` that were given.

        Raises:
            UndividedError: An argument is not supported with workers.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        for name in given.keys() - fields:
            raise UndividedError(
                f"fit(num_processes=...) does not know `{name}`. Received: "
                f"{name}={_short(given[name])}. Leave it out, or train with one process."
            )
        return cls(**given)._limited()

    def _limited(self) -> FitArguments:
        """Reduces the arguments to `keras_runs.run_limits`, and warns as Keras does."""
        most_epochs, most_steps = keras_runs.run_limits()
        changed: dict[str, int] = {}
        if most_epochs and most_epochs < self.epochs:
            warnings.warn(f"Limiting epochs to {most_epochs}", stacklevel=2)
            changed["epochs"] = most_epochs
        validates = bool(self.validation_split) or self.validation_data is not None
        for name in ("steps_per_epoch", "validation_steps") if validates else ("steps_per_epoch",):
            steps = getattr(self, name)
            if most_steps and (not steps or most_steps < steps):
                warnings.warn(f"Limiting steps_per_epoch to {most_steps}", stacklevel=2)
                changed[name] = most_steps
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
