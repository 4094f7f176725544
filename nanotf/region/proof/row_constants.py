"""Tells the states of constants by their values for two numbers of rows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from nanotf.region.proof.states import COUNT, EQUAL, ROWS, WHOLE, ZEROS, Coupled, TensorState


class RowConstants:
    """The states of constants.

    Args:
        rows: the number of rows of the trace that has them.
        other_rows: that of the other trace.
    """

    def __init__(self, rows: int, other_rows: int) -> None:
        self._rows, self._other_rows = rows, other_rows

    def state_of(self, value: Any, other: Any) -> TensorState:
        """Returns the state of a constant by its values in the traces; None if one lacks it."""
        if other is None:  # made for the gradient, where numbers of rows come from shapes alone
            if value.dtype.kind not in "iuf" or not value.size:
                return EQUAL
            if any(d % self._rows == 0 and d for d in value.shape):
                return self._repeated(value)
            many = value != 0
            many &= np.abs(value) < 2**62
            many &= np.mod(value, self._rows) == 0
            if not many.any():
                return EQUAL if value.any() else ZEROS
            # A multiple of the square is a product of two numbers of rows, at least.
            if value.ndim == 0 and value % self._rows**2:
                return TensorState(WHOLE, Fraction(1))
            if value.dtype.kind == "f":
                raise Coupled("is a number made from the number of rows")
            return COUNT
        if value.shape != other.shape:
            if any(d % self._rows == 0 and d for d in value.shape):
                return self._repeated(value)
            raise Coupled("has a shape that depends on the number of rows")
        if value.dtype.kind not in "iufc":
            if not np.array_equal(value, other):
                raise Coupled("depends on the number of rows")
            return EQUAL
        if np.array_equal(value, other, equal_nan=value.dtype.kind in "fc"):
            return EQUAL if np.any(value) else ZEROS
        power = self._power(value, other)
        if power is not None:
            return TensorState(WHOLE, power)
        if value.dtype.kind in "iu":
            return COUNT
        raise Coupled("is a number made from the number of rows")

    def _repeated(self, value: Any) -> TensorState:
        axis = next(i for i, d in enumerate(value.shape) if d and d % self._rows == 0)
        each = value.shape[axis] // self._rows
        parts = np.split(value, self._rows, axis) if each > 1 else [np.take(value, [0], axis)]
        if not (
            value == (parts[0] if each == 1 else np.concatenate([parts[0]] * self._rows, axis))
        ).all():
            raise Coupled("depends on the place of a row in the batch")
        return TensorState(ROWS, Fraction(0) if value.any() else None, axis, each)

    def _power(self, value: Any, other: Any) -> Fraction | None:
        """Returns the power of the number of rows that a scalar is proportional to, if any."""
        if value.ndim or value.dtype.kind == "c" or float(value) * float(other) <= 0:
            return None
        ratio = self._other_rows / self._rows
        twice = round(2 * math.log(float(other) / float(value)) / math.log(ratio))
        # Two numbers of float32 are each rounded by up to 6e-8.
        tolerance = 1e-12 if value.dtype.kind in "iu" else 2e-7
        exact = math.isclose(float(value) * ratio ** (twice / 2), float(other), rel_tol=tolerance)
        return Fraction(twice, 2) if exact and abs(twice) <= 8 else None
