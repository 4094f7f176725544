"""Checks that all workers have the same numbers, as they must when they run one program.

A program can make them differ: by a random generator seeded with the time, the order of a set, or
a branch that depends on the rank. Each worker would then continue with its own weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import keras_common, values
from nanotf.errors import DivergedError
from nanotf.region.rows import Exchange

_EVERY = 64  # steps between comparisons; before the 64th, steps 1, 2, 4, 8, ...
SAME = 1e-3  # relative; rounding may make equal numbers differ by less


class ReplicaCheck:
    """Compares the workers after the steps of one program."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._steps = 0

    def check(self, step: str, value: Any, variables: Sequence[Any]) -> None:
        """Compares the workers after some of the steps; all workers call it after each step.

        Args:
            step: its name.
            value: the step's result.
            variables: the `tf.Variable`s to compare.

        Raises:
            DivergedError: The workers have different numbers.
        """
        self._steps += 1
        if self._steps % _EVERY and self._steps & (self._steps - 1):
            return
        self.compare(f"step {self._steps}, {step}", value, variables)

    def compare(self, when: str, value: Any, variables: Sequence[Any]) -> None:
        """Compares the workers now.

        Args:
            when: names the moment in the error.
            value, variables: as in `look`.
        """
        numbers = [*_returned(value), *held(variables)]
        sizes = [size for _, size in numbers]
        # Ranks that returned a different number of tensors can at least compare these two.
        ranks = self._gathered([float(len(sizes)), float(np.sum(sizes))])
        if differ(ranks):
            self._raise(when, numbers, bool(np.ptp(ranks[:, 0])))

    def _gathered(self, numbers: Sequence[float]) -> Any:
        rows = tf.constant([list(numbers)], tf.float64)
        return self._exchange.gather_rows(rows).numpy()

    def _raise(self, when: str, numbers: Sequence[tuple[str, float]], other_count: bool) -> None:
        what = "its result, which has a different number of tensors"
        if not other_count:
            sizes = self._gathered([size for _, size in numbers])
            places = [i for i in range(len(numbers)) if differ(sizes[:, i : i + 1])]
            what = numbers[places[0]][0] if places else "a sum of all that it computes"
        raise DivergedError(
            "All workers run the same program, and must compute the same numbers. Received: after "
            f"{when}, the workers differ in {what}. Let nothing in the program depend on the time, "
            "on the process or on the order of a set, and seed every random generator."
        )


def differ(ranks: Any) -> bool:
    """Returns True if numbers that should be equal are not.

    Args:
        ranks: array of shape (workers, numbers).
    """
    # NaN on all ranks is alike, though NaN is equal to nothing.
    limit = SAME * np.abs(ranks).max(axis=0) + 1e-30
    alike = (np.ptp(ranks, axis=0) <= limit) | ~np.isfinite(ranks).any(axis=0)
    return not bool(np.all(alike))


def _returned(value: Any) -> Iterator[tuple[str, float]]:
    for place, leaf in enumerate(tf.nest.flatten(value)):
        if isinstance(leaf, (float, np.floating, np.ndarray, tf.Tensor)):
            array = np.asarray(leaf)
            if array.dtype.kind in "iuf" or array.dtype.name == "bfloat16":
                yield f"value {place} of what it returns", float(np.abs(array.astype("f8")).sum())


def held(variables: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yields the name and the Euclidean norm of each floating-point variable."""
    for variable in variables:
        if variable.dtype.is_floating:
            value = values.read(keras_common.tf_variable(variable))
            if value.dtype.size < 4:  # its squares would overflow
                value = tf.cast(value, tf.float32)
            # One op that makes no copy: at an epoch's end, of all of a model's variables.
            norm = math.sqrt(2 * float(tf.nn.l2_loss(value)))
            yield f"the variable {variable.name!r}", norm
