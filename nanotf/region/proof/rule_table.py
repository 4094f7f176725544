"""The table of rules: the states of an operation's results by those of its inputs.

A rule need not say where the rows of a result lie. `graph_reader.Reader` finds the one axis whose
length is a multiple of the number of rows, a prime that no other length is a multiple of. A result
that should have rows, but has no such axis, or two, is unknown. So a rule only has to exclude what
shapes cannot show: rows in another order, and rows that meet each other along their own axis.

An operation without a rule has no known result: the layer runs whole, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from nanotf.region.proof.states import (
    NOTHING,
    PARTIAL,
    ROWS,
    WHOLE,
    TensorState,
)


class RuleArguments(Protocol):
    """One operation, as its rule sees it.

    It notes of which inputs the rule has read the state or the value. Each other input must be
    equal on all workers, or be the shape of a result: what a rule does not name cannot have rows.
    An input of another kind than the rule takes has made the operation unknown before.
    """

    operation: Any
    inputs: Sequence[TensorState]
    rows: int  # the number of rows of the batch

    def value(self, place: int) -> Any:
        """Returns an input's value as an array.

        Raises `Coupled` if it is not constant, or depends on the number of rows.
        """

    def value_by_rows(self, place: int) -> tuple[Any, Any]:
        """Returns an input's value, and for each element whether the number of rows changes it.

        Raises `Coupled` if it is not constant.
        """

    def shape(self, place: int) -> list[int | None]:
        """Returns an input's shape. Raises `Coupled` if its rank is unknown."""

    def out_shape(self, place: int = 0) -> list[int | None]:
        """Returns a result's shape."""

    def ignores(self, place: int) -> None:
        """Notes that no result depends on the elements of an input."""


Rule = Callable[[RuleArguments], "TensorState | list[TensorState]"]
RULES: dict[str, Rule] = {}
# The kinds of states that the inputs of an operation may have. Whatever else an input is, the
# operation's results are unknown.
TAKES: dict[str, frozenset[str]] = {}
_DATA = (WHOLE, ROWS, PARTIAL, NOTHING)


def rule(names: str, *more: str) -> Callable[[Rule], Rule]:
    """Registers the rule of operations, with kinds that they take besides `_DATA`."""

    def register(rule: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, name  # a second rule would replace the first in silence
            RULES[name] = rule
            TAKES[name] = frozenset((*_DATA, *more))
        return rule

    return register


def attribute(step: RuleArguments, name: str) -> Any:
    return step.operation.get_attr(name)


def is_real(step: RuleArguments) -> bool:
    """Returns False for whole numbers, whose quotients are rounded."""
    dtype = step.operation.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_complex)


def is_equal(state: TensorState) -> bool:
    return state.kind == WHOLE and not state.power


def summed(state: TensorState) -> TensorState:
    """Returns the state of a sum over all axes."""
    return TensorState(PARTIAL, state.power) if state.is_rows else state


def _normalized(axes: Any, rank: int) -> list[int]:
    return [int(axis) % rank for axis in np.ravel(axes)]


def crosses(step: RuleArguments, axes: Any, place: int = 0) -> bool:
    """Returns True if some of the axes are the one along which an input's rows lie."""
    state = step.inputs[place]
    return state.is_rows and state.axis in _normalized(axes, len(step.shape(place)))
