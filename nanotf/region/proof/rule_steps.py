"""Applies a rule to an operation, and checks that it knows of all inputs that depend on rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from nanotf.region.proof import elementwise_rules, row_numbers, rule_table, rules
from nanotf.region.proof.states import CHANGED, COUNTED, HANDLE, LIST, WHOLE, Coupled, TensorState

_OTHER_KINDS = {  # why an operation has no known result
    COUNTED: "uses the number of rows",
    CHANGED: "uses a variable after rows have changed it",
    LIST: "uses a list that another operation made",
}


def by_rule(rule: rule_table.Rule, step: RuleStep) -> list[TensorState] | TensorState:
    """Applies a rule. Raises `Coupled` if it does not know of an input that depends on rows."""
    operation = step.operation
    lengths = row_numbers.LENGTHS.get(operation.type, ())
    shapes = (*lengths, *row_numbers.ELEMENT_SHAPES.get(operation.type, ()))
    for place, state in enumerate(step.states):
        is_shape = place in shapes and is_number(state)
        if state.kind not in rules.TAKES[operation.type] and not is_shape:
            raise Coupled(_OTHER_KINDS.get(state.kind, "takes no such input"))
        if is_shape and place in lengths and not _are_known(operation.outputs):
            raise Coupled("makes a tensor of an unknown shape from the number of rows")
    found = rule(step)
    for place, state in step.unread():  # by now the rule has read all that it knows of
        is_equal = state.kind == HANDLE or (state.kind == WHOLE and not state.power)
        if not (is_equal or (place in shapes and is_number(state))):
            raise Coupled("takes more than its data from rows, or from their number")
    if rule in elementwise_rules.BROADCASTING:
        _check_broadcast(operation, step.states)
    return found


def _check_broadcast(operation: Any, states: Sequence[TensorState]) -> None:
    """Refuses a whole value that may be as long as the batch by chance, beside its rows."""
    shapes = [tensor.shape for tensor in operation.inputs]
    along = [
        # Counted from the last axis, as shapes are broadcast.
        state.axis - shape.rank
        for state, shape in zip(states, shapes, strict=True)
        if state.is_rows and shape.rank is not None
    ]
    for state, shape in zip(states, shapes, strict=True):
        if along and not state.is_rows:
            axis = -1 if shape.rank is None else shape.rank + along[0]
            if shape.rank is None or (axis >= 0 and shape[axis] is None):
                raise Coupled("combines rows with a tensor of unknown length")


def _are_known(tensors: Iterable[Any]) -> bool:
    return all(tensor.shape.is_fully_defined() for tensor in tensors)


def is_number(state: TensorState) -> bool:
    """Returns True for numbers and shapes made from the number of rows."""
    return state.kind == COUNTED or (state.kind == WHOLE and bool(state.power))


class _NotedStates(Sequence[TensorState]):
    """States that note their places when they are read."""

    def __init__(self, states: Sequence[TensorState]) -> None:
        self._states = states
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, place: int) -> TensorState: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[TensorState]: ...

    def __getitem__(self, place: int | slice) -> TensorState | Sequence[TensorState]:
        places = range(len(self._states))[place]
        self.read.update([places] if isinstance(places, int) else places)
        return self._states[place]


class RuleStep:
    """One operation; see `rule_table.RuleArguments`."""

    def __init__(self, reader: Any, operation: Any, inputs: list[TensorState]) -> None:
        self._reader, self.operation = reader, operation
        self.states = inputs
        self._noted = _NotedStates(inputs)
        self.inputs: Sequence[TensorState] = self._noted
        self.rows = reader.rows

    def ignores(self, place: int) -> None:
        self._noted.read.add(place)

    def unread(self) -> Iterator[tuple[int, TensorState]]:
        """Yields the places and states of inputs that the rule has not read."""
        for place in sorted(set(range(len(self.inputs))) - self._noted.read):
            yield place, self.inputs[place]

    def value(self, place: int) -> Any:
        value, varies = self.value_by_rows(place)
        if varies.any():
            raise Coupled("works along axes that depend on the number of rows")
        return value

    def value_by_rows(self, place: int) -> tuple[Any, Any]:
        self._noted.read.add(place)
        tensor = self.operation.inputs[place]
        found = self._reader.value(tensor)
        if found is None:
            raise Coupled("works along axes that are not constant")
        value = np.ravel(found)
        return value, self._reader.varies(tensor, value)

    def shape(self, place: int) -> list[int | None]:
        return _known(self.operation.inputs[place])

    def out_shape(self, place: int = 0) -> list[int | None]:
        return _known(self.operation.outputs[place])


def _known(tensor: Any) -> list[int | None]:
    if tensor.shape.rank is None:
        raise Coupled("has an unknown number of axes")
    return list(tensor.shape)
