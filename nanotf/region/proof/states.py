"""States: a worker's tensor of a divided call, compared with the tensor of one process.

The states are those of GSPMD (Xu et al., 2021) and of OneFlow's SBP (Yuan et al., 2021), split,
broadcast and partial, with a power of the worker's share `s` of the rows of the batch:

| state | on a worker, with `t` the value in one process |
| --- | --- |
| `WHOLE`, power e | `t * s**e`: with 0 equal on all workers; the number of rows has 1 |
| `ROWS`, power e | the worker's rows of `t`, times `s**e` |
| `PARTIAL`, power e | a value whose sum over workers, each times `s**-e`, is `t`: with 0 a sum over rows, with -1 a mean |
| `COUNTED` | an integer or a shape made from the number of rows in another way |
| `CHANGED` | the value of a variable plus a sum over rows, to be assigned to that variable |
| `LIST` | a list of tensors of one state |
| `HANDLE` | a variable's memory |
| `UNKNOWN` | anything else, with the operation that is the reason |
| `NOTHING` | no element yet, as in an empty list |

A product adds powers, a sum needs equal ones. Zeros have any power, written None.
"""  # fmt: skip

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from nanotf.compat import keras_layers

WHOLE, ROWS, PARTIAL = "whole", "rows", "partial"
COUNTED, CHANGED, LIST, HANDLE = "counted", "changed", "list", "handle"
UNKNOWN, NOTHING = "unknown", "nothing"

Power = Fraction | None


@dataclasses.dataclass(frozen=True)
class TensorState:
    """The state of a tensor."""

    kind: str  # one of the constants above
    power: Power = Fraction(0)  # see above; None for zeros
    axis: int = 0  # of `ROWS`, along which they lie
    each: int = 1  # of `ROWS`, how many lie there for each row of the batch; 0 if shapes tell
    # Of `ROWS`, whether those of one row of the batch lie apart, as after a transposition, and not
    # side by side.
    strided: bool = False
    # The `TensorState` of a list's elements; the key of a handle, also of the variable that is
    # `CHANGED`; of `UNKNOWN` the `Reason`.
    of: Any = None

    @property
    def is_rows(self) -> bool:
        return self.kind == ROWS

    def to(self, power: Power) -> TensorState:
        """Returns this state with another power."""
        return dataclasses.replace(self, power=power)

    def is_plain(self) -> bool:
        """Returns True for rows or whole values as they are in one process."""
        return self.kind in (WHOLE, ROWS) and not self.power


@dataclasses.dataclass(frozen=True)
class Reason:
    """The reason of an unknown state."""

    operation: Any  # the `tf.Operation`
    text: str  # a phrase such as "works along the rows"


EQUAL = TensorState(WHOLE)  # equal on all workers
ZEROS = TensorState(WHOLE, None)
COUNT = TensorState(COUNTED)
EMPTY = TensorState(NOTHING)


class Coupled(Exception):
    """Raised by a rule that has no state for a result; the text is the `Reason`'s."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        setattr(self, keras_layers.AS_IT_IS, True)  # else Keras raises another with its text


def add_powers(one: Power, other: Power, sign: int = 1) -> Power:
    """Returns the power of a product, of a quotient with `sign` -1."""
    return None if one is None or other is None else one + sign * other


def product(one: TensorState, other: TensorState, sign: int = 1) -> TensorState:
    """Returns the state of an element-wise product, or of a quotient with `sign` -1."""
    # A product with zeros is zeros, a quotient by them is not.
    power = add_powers(one.power, other.power if sign > 0 else other.power or Fraction(0), sign)
    kinds = {one.kind, other.kind}
    if kinds == {WHOLE}:
        return TensorState(WHOLE, power)
    if kinds <= {WHOLE, ROWS}:
        return _rows_of(one, other).to(power)
    if kinds == {WHOLE, PARTIAL} and (sign > 0 or one.kind == PARTIAL):
        return TensorState(PARTIAL, power)
    raise Coupled("multiplies or divides by a sum or mean over rows")


def total(states: Iterable[TensorState]) -> TensorState:
    """Returns the state of an element-wise sum, or of a choice between tensors."""
    found: TensorState | None = None
    for state in states:
        found = state if found is None else _sum(found, state)
    assert found is not None
    return found


def _sum(one: TensorState, other: TensorState) -> TensorState:
    if NOTHING in (one.kind, other.kind):
        return other if one.kind == NOTHING else one
    if LIST in (one.kind, other.kind):
        if one.kind != other.kind:
            raise Coupled("mixes a list with a tensor")
        if one.of.is_rows and other.of.is_rows and one.of.axis != other.of.axis:
            raise Coupled("keeps rows of different axes in one list")
        return TensorState(LIST, of=_sum(one.of, other.of))
    kinds = {one.kind, other.kind}
    if kinds == {ROWS, PARTIAL}:
        raise Coupled("combines rows with a sum or mean over rows")
    if one.power is None or other.power is None:  # zeros
        power = other.power if one.power is None else one.power
        if kinds == {WHOLE, PARTIAL}:
            return (other if one.power is None else one).to(power)
    elif kinds == {WHOLE, PARTIAL}:
        whole, part = (one, other) if one.kind == WHOLE else (other, one)
        assert whole.power is not None and part.power is not None
        if whole.power != part.power + 1:  # as many parts as workers, weighed by their shares
            raise Coupled("adds a sum over rows to a number")
        return part
    elif one.power != other.power:
        raise Coupled("adds a number of rows, or a value divided by it, to another value")
    else:
        power = one.power
    if kinds == {PARTIAL} or kinds == {WHOLE}:
        return one.to(power)
    if kinds <= {WHOLE, ROWS}:
        return _rows_of(one, other).to(power)
    if kinds == {HANDLE} and one.of == other.of:
        return one
    if kinds == {COUNTED} or kinds == {WHOLE, COUNTED}:
        return COUNT
    raise Coupled("combines rows with a sum or mean over rows")


def plain(states: Iterable[TensorState]) -> TensorState:
    """Returns the state of any element-wise function of rows and whole values."""
    found = EQUAL
    for state in states:
        if not state.is_plain():
            raise Coupled(
                "uses a sum or mean over rows"
                if state.kind == PARTIAL
                else "uses the number of rows"
            )
        found = (
            _rows_of(found, state).to(Fraction(0)) if ROWS in (found.kind, state.kind) else EQUAL
        )
    return found


def _rows_of(one: TensorState, other: TensorState) -> TensorState:
    """Returns the one of two states that has rows. With both, their rows must lie alike."""
    if not (one.is_rows and other.is_rows):
        return one if one.is_rows else other
    if (one.strided, one.each) != (other.strided, other.each):
        raise Coupled("combines rows in different orders")
    return one
