"""Padding rows, for engines that cannot compute every number of rows, or are slow at first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanotf.inference.engines.inference_engine import Arrays, Runner
from nanotf.inference.signature import Signature


class PaddedRows:
    """A runner that gets padding rows of zeros, or empty texts; they are cut off its outputs.

    That changes no other row of a model whose rows are proved to be apart, and it is always right
    for no rows. Signatures whose inputs and outputs do not all have any number of rows are computed
    as they are.

    Args:
        runner: computes the padded batches.
        signatures: by name, those to pad. The runner may have others.
        wanted: returns for a number of rows how many there must be, not fewer.
    """

    def __init__(
        self, runner: Runner, signatures: Mapping[str, Signature], wanted: Callable[[int], int]
    ) -> None:
        self._runner, self._wanted = runner, wanted
        self._divisible = {name for name, each in signatures.items() if each.has_rows}

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """See `Runner`."""
        # Inputs of different lengths, or none: the model itself says what it makes of them.
        lengths = {len(array) for array in inputs.values()} if signature in self._divisible else ()
        if len(lengths) != 1:
            return self._runner.run(inputs, signature)
        (rows,) = lengths
        more = self._wanted(rows) - rows
        if not more:
            return self._runner.run(inputs, signature)
        padded = {name: _padded(array, more) for name, array in inputs.items()}
        found = self._runner.run(padded, signature)
        return {name: array[:rows] for name, array in found.items()}  # views of the padded outputs


def _padded(array: np.ndarray[Any, Any], more: int) -> np.ndarray[Any, Any]:
    shape = (more, *array.shape[1:])
    zeros = np.full(shape, b"") if array.dtype == object else np.zeros(shape, array.dtype)
    return np.concatenate([array, zeros.astype(array.dtype)])


def at_least_one(rows: int) -> int:
    """Returns the number of rows for an engine that cannot compute none."""
    return max(rows, 1)


def power_of_two(rows: int) -> int:
    """Returns the next power of two, so that few numbers of rows occur."""
    return 1 << max(rows - 1, 0).bit_length()  # 1 for no rows
