"""A moment of training, from which it continues: in new workers, or in a new process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotf.compat import values

Values = list[np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Moment:
    """The end of an epoch or of a step, or the start of training."""

    epoch: int  # the epoch to run next, or to complete
    step: int  # its steps that are complete
    values: Values  # of the variables of a call's `StateLayout`, in its order
    # Of the metrics' variables; empty at an epoch's end, after which Keras resets them
    metrics: Values = dataclasses.field(default_factory=list)
    logs: Any = None  # a dict, of the last step or epoch; None before the first

    def place(self, epochs: int, steps: int | None) -> str:
        """Describes the moment for people, such as "epoch 3 of 5, after step 40 of 47".

        Args:
            epochs: the epochs of the training.
            steps: the steps of an epoch; None if they are unknown.
        """
        text = f"epoch {self.epoch + 1} of {epochs}"
        if self.step:
            text += f", after step {self.step}" + ("" if steps is None else f" of {steps}")
        return text


def read_all(variables: Sequence[Any]) -> Values:
    """Returns copies of the values of `tf.Variable`s."""
    # Copied: on a CPU, the array of `numpy` may share the tensor's memory.
    return [np.array(values.read(variable).numpy()) for variable in variables]


def write_all(variables: Sequence[Any], given: Sequence[np.ndarray[Any, Any]]) -> None:
    """Sets `tf.Variable`s to values in the order of `read_all`."""
    for variable, value in zip(variables, given, strict=True):
        values.write(variable, value)
