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


def read_all(variables: Sequence[Any]) -> Values:
    """Returns copies of the values of `tf.Variable`s."""
    return [np.array(values.read(variable).numpy()) for variable in variables]


def write_all(variables: Sequence[Any], given: Sequence[np.ndarray[Any, Any]]) -> None:
    """Sets `tf.Variable`s to values in the order of `read_all`."""
    for variable, value in zip(variables, given, strict=True):
        values.write(variable, value)
