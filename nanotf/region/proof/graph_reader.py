"""Reads the graph of a call and gives each tensor a `TensorState`, by the rule of its operation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, overload

import numpy as np
import tensorflow as tf

from nanotf.compat import graphs
from nanotf.region.proof import rules
from nanotf.region.proof.states import (
    CHANGED,
    COUNT,
    COUNTED,
    EQUAL,
    HANDLE,
    LIST,
    NOTHING,
    PARTIAL,
    ROWS,
    UNKNOWN,
    WHOLE,
    ZEROS,
    Coupled,
    Reason,
    TensorState,
    total,
)

_SMALL = 64  # elements of a value that is computed here
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_ADDS = ("Add", "AddV2", "Sub")
_SUM, _MEAN = "sum", "mean"
_OTHER_KINDS = {  # why an operation has no known result
    COUNTED: "uses the number of rows",
    CHANGED: "uses a variable after rows have changed it",
    LIST: "uses a list that another operation made",
}


class Reader:
    """The states of a graph's tensors.

    Args:
        rows: the number of rows that the graph was traced with: a prime.
        twins: by `id` of a tensor, the tensor in its place in another trace, with another
            number of rows. Empty for tensors that one trace alone has.
        other_rows: the number of rows of that other trace.

    Attributes:
        states: dict of `id` of a tensor to its `TensorState`.
        failures: list of `Reason`: effects that depend on rows in unknown ways.
        changes: dict of the key of a variable's handle to the kind of what was added to the
            variable, "sum" or "mean" over workers.
    """

    def __init__(self, rows: int, twins: Mapping[int, Any], other_rows: int) -> None:
        self.rows, self.other_rows, self._twins = rows, other_rows, twins
        self.states: dict[int, TensorState] = {}
        self.kept: set[int] = set()  # ids of tensors whose states are given
        self.exchanged: set[int] = (
            set()
        )  # ids of tensors that workers exchange: the sums of partial ones
        self.failures: list[Reason] = []
        self.changes: dict[Any, str] = {}
        self._values: dict[int, Any] = {}
        self._read: set[Any] = set()  # operations without results that were read

    def add_twins(self, twins: Mapping[int, Any]) -> None:
        """Adds tensors of the other trace, made since."""
        self._twins = {**self._twins, **twins}

    def give(self, states: Mapping[int, TensorState]) -> None:
        """Sets states of tensors, by `id`, instead of their operations' rules."""
        self.states.update(states)
        self.kept.update(states)

    def of(self, tensor: Any) -> TensorState:
        """Returns a tensor's state."""
        return self.states.get(id(tensor), EQUAL)

    def read(self, graph: Any) -> None:
        """Gives states to the graph's tensors that have none, those of inputs first.

        The order in which operations were made is not enough: a loop gets inputs made after it when
        it is differentiated.
        """
        for first in graph.get_operations():
            waiting = [first]
            while waiting:
                operation = waiting[-1]
                if self._is_read(operation):
                    waiting.pop()
                    continue
                missing = [t.op for t in operation.inputs if id(t) not in self.states]
                if missing:
                    waiting += missing
                    continue
                waiting.pop()
                self._read.add(operation)
                results = self._results(operation)
                for tensor, state in zip(operation.outputs, results, strict=True):
                    if id(tensor) not in self.kept:
                        self.states[id(tensor)] = state

    def _is_read(self, operation: Any) -> bool:
        outputs = operation.outputs
        if not outputs:
            return operation in self._read
        return all(id(tensor) in self.states for tensor in outputs)

    # ------------------------------------------------------------------------------ operations
    def _results(self, operation: Any) -> list[TensorState]:
        inputs = [self.of(tensor) for tensor in operation.inputs]
        count = len(operation.outputs)
        unknown = next((state for state in inputs if state.kind == UNKNOWN), None)
        try:
            if operation.type in graphs.RUN_PYTHON:
                raise Coupled("runs Python code, which the graph does not show")
            if unknown is not None and self._is_clamped(operation):
                return [self._placed(operation, operation.outputs[0], EQUAL)]
            if unknown is not None and operation.type != "Assert":
                self._note_effects(operation, unknown.of)
                return [unknown] * count
            found = self._by_kind(operation, inputs)
        except Coupled as coupled:
            reason = Reason(operation, str(coupled))
            self._note_effects(operation, reason)
            return [TensorState(UNKNOWN, of=reason)] * count
        found = found if isinstance(found, list) else [found] * count
        return [
            self._placed(operation, tensor, state)
            for tensor, state in zip(operation.outputs, found, strict=True)
        ]

    def _is_clamped(self, operation: Any) -> bool:
        """Returns True for `minimum(maximum(x, a), b)` with a >= b, which is b."""
        if operation.type != "Minimum":
            return False
        for inner, outer in (operation.inputs, reversed(operation.inputs)):
            if inner.op.type == "Maximum":
                limit = self.value(outer)
                least = [value for value in map(self.value, inner.op.inputs) if value is not None]
                if limit is not None and least and np.all(least[0] >= limit):
                    return True
        return False

    def _note_effects(self, operation: Any, reason: Reason) -> None:
        """Registers an operation whose unknown results are not all that it has."""
        if graphs.has_effects(operation):
            self.failures.append(reason)

    def _by_kind(
        self, operation: Any, inputs: list[TensorState]
    ) -> list[TensorState] | TensorState:
        kind = operation.type
        if id(operation.outputs[0] if operation.outputs else None) in self.exchanged:
            return _exchanged(inputs[0])
        if kind in _CALLS:
            return self._call(graphs.functions_of(operation)[0], inputs)
        if kind in ("While", "StatelessWhile"):
            return self._loop(operation, inputs)
        if kind in ("If", "StatelessIf", "Case", "StatelessCase"):
            return self._branch(operation, inputs)
        if kind in ("Assert", "NoOp"):
            return [EQUAL] * len(operation.outputs)
        if kind.startswith(("Assign", "ResourceScatter")):
            self._assign(operation, inputs)
            return []
        if any(state.kind == HANDLE and state.of in self.changes for state in inputs):
            raise Coupled("reads a variable that rows have changed")
        if kind in ("Placeholder", "VarHandleOp"):
            is_handle = operation.outputs[0].dtype in (tf.resource, tf.variant)
            return TensorState(HANDLE, of=operation.name) if is_handle else EQUAL
        if kind == "ReadVariableOp":
            return EQUAL
        numbers = [place for place, state in enumerate(inputs) if _is_number(state)]
        if numbers and not rules.may_take_numbers(operation, numbers):
            raise Coupled("uses the number of rows")
        follows = not numbers or rules.follows_numbers(operation, numbers)
        counted = self._counted(operation, inputs) if follows else None
        if counted is not None:
            return counted
        if kind in _ADDS:
            changed = self._added_to(operation, inputs)
            if changed is not None:
                return changed
        rule = rules.RULES.get(kind)
        are_equal = all(state.kind in (WHOLE, HANDLE) and not state.power for state in inputs)
        try:
            if rule is not None:
                return _by_rule(rule, _RuleArguments(self, operation, inputs))
        except Coupled:
            if not are_equal:
                raise
        if are_equal:
            return EQUAL
        if all(state.kind in (WHOLE, COUNTED, HANDLE) for state in inputs) and not any(
            tensor.dtype.is_floating for tensor in operation.outputs
        ):
            return COUNT
        raise Coupled("has no rule that says whether its rows are apart")

    def _placed(self, operation: Any, tensor: Any, state: TensorState) -> TensorState:
        """Completes a result's state by its shape, which must not contradict it."""
        if state.kind not in (WHOLE, ROWS, PARTIAL):
            return state
        if not self._is_like_twin(tensor):
            reason = Reason(operation, "has a shape that depends on the number of rows")
            self._note_effects(operation, reason)
            return TensorState(UNKNOWN, of=reason)
        if tensor.shape.rank is None:
            axes = [0, 0] if state.is_rows else []
        else:
            axes = [i for i, d in enumerate(tensor.shape) if d and d % self.rows == 0]
        if state.is_rows and len(axes) == 1:
            each = tensor.shape[axes[0]] // self.rows
            if state.each in (0, each):
                return TensorState(ROWS, state.power, axes[0], each, state.strided and each > 1)
        overflows = state.kind == PARTIAL and state.power is not None and tensor.dtype == tf.float16
        if not (state.is_rows or axes or overflows):
            return state
        text = "combines rows of the batch with other rows of it, or depends on their places"
        if overflows:
            text = "sums rows in float16, which overflows sooner for more of them"
        reason = Reason(operation, text)
        self._note_effects(operation, reason)
        return TensorState(UNKNOWN, of=reason)

    def _is_like_twin(self, tensor: Any) -> bool:
        """Returns False if more than the number of rows differs in the other trace's shape."""
        twin = self._twins.get(id(tensor))
        if twin is None or None in (tensor.shape.rank, twin.shape.rank):
            return True
        pairs = list(zip(tensor.shape, twin.shape, strict=False))
        return tensor.shape.rank == twin.shape.rank and all(
            None in (mine, theirs) or theirs == self._length_there(mine) for mine, theirs in pairs
        )

    def _length_there(self, length: int) -> int:
        """Returns the length in the other trace of an axis that has this length here."""
        return length if length % self.rows else length // self.rows * self.other_rows

    # ------------------------------------------------------------------ numbers made from shapes
    def _counted(self, operation: Any, inputs: Sequence[TensorState]) -> list[TensorState] | None:
        """Returns the states of results that are constants, None if there are other results."""
        if operation.type in ("Identity", "IdentityN"):
            return None  # an exchange's result is equal on all workers, although its input is not
        is_source = operation.type in ("Const", "Shape", "ShapeN", "Size", "Rank")
        if not is_source:
            if not any(state.kind == COUNTED or state.power for state in inputs):
                return None
            if any(state.kind not in (WHOLE, COUNTED) for state in inputs):
                return None
        found = []
        for tensor in operation.outputs:
            value = self.value(tensor)
            if value is None:
                return None
            twin = self._twins.get(id(tensor))
            other = None if twin is None else self.value(twin)
            if twin is not None and other is None:
                return None
            found.append(self._constant(value, other))
        return found

    def _constant(self, value: Any, other: Any) -> TensorState:
        if other is None:  # made for the gradient, where numbers of rows come from shapes alone
            if value.dtype.kind not in "iuf" or not value.size:
                return EQUAL
            if any(d % self.rows == 0 and d for d in value.shape):
                return self._repeated(value)
            many = value != 0
            many &= np.abs(value) < 2**62
            many &= np.mod(value, self.rows) == 0
            if not many.any():
                return EQUAL if value.any() else ZEROS
            if value.ndim == 0 and value % self.rows**2:
                return TensorState(WHOLE, Fraction(1))
            if value.dtype.kind == "f":
                raise Coupled("is a number made from the number of rows")
            return COUNT
        if value.shape != other.shape:
            if any(d % self.rows == 0 and d for d in value.shape):
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
        axis = next(i for i, d in enumerate(value.shape) if d and d % self.rows == 0)
        each = value.shape[axis] // self.rows
        parts = np.split(value, self.rows, axis) if each > 1 else [np.take(value, [0], axis)]
        if not (
            value == (parts[0] if each == 1 else np.concatenate([parts[0]] * self.rows, axis))
        ).all():
            raise Coupled("depends on the place of a row in the batch")
        return TensorState(ROWS, Fraction(0) if value.any() else None, axis, each)

    def _power(self, value: Any, other: Any) -> Fraction | None:
        """Returns the power of the number of rows that a scalar is proportional to, if any."""
        if value.ndim or value.dtype.kind == "c" or float(value) * float(other) <= 0:
            return None
        ratio = self.other_rows / self.rows
        twice = round(2 * math.log(float(other) / float(value)) / math.log(ratio))
        tolerance = 1e-12 if value.dtype.kind in "iu" else 2e-7
        exact = math.isclose(float(value) * ratio ** (twice / 2), float(other), rel_tol=tolerance)
        return Fraction(twice, 2) if exact and abs(twice) <= 8 else None

    def value(self, tensor: Any) -> Any:
        """Returns a constant tensor's value as an array, None if it is not constant or is large."""
        key = id(tensor)
        if key not in self._values:
            self._values[key] = None  # meanwhile, in a loop
            self._values[key] = graphs.constant(tensor, self.value, _SMALL)
        return self._values[key]

    def varies(self, tensor: Any, value: Any) -> Any:
        """Returns for each element of a constant tensor whether it depends on the number of rows."""
        twin = self._twins.get(id(tensor))
        other = None if twin is None else self.value(twin)
        if other is None:  # made for the gradient, see `_constant`
            return (np.mod(value, self.rows) == 0) & (value != 0)
        if np.size(other) != np.size(value):
            raise Coupled("has a shape that depends on the number of rows")
        return np.ravel(other) != value

    # --------------------------------------------------------------------------- functions in graphs
    def _call(self, graph: Any, inputs: Sequence[TensorState]) -> list[TensorState]:
        self._forget(graph)
        for tensor, state in zip(graph.inputs, inputs, strict=True):
            self.states[id(tensor)] = state
        self.read(graph)
        return [self.of(tensor) for tensor in graph.outputs]

    def _forget(self, graph: Any) -> None:
        """Drops the states of a graph's operations, which depend on its inputs' states."""
        for operation in graph.get_operations():
            self._read.discard(operation)
            for tensor in operation.outputs:
                if id(tensor) not in self.kept:
                    self.states.pop(id(tensor), None)

    def _branch(self, operation: Any, inputs: list[TensorState]) -> list[TensorState]:
        if not (inputs[0].kind == WHOLE and not inputs[0].power):
            raise Coupled("takes a branch that depends on rows")
        before, after = dict(self.changes), dict(self.changes)
        found = []
        for graph in graphs.functions_of(operation):
            self.changes = dict(before)
            found.append(self._call(graph, inputs[1:]))
            after = _united(after, self.changes)
        self.changes = after
        return [self._joined(states) for states in zip(*found, strict=True)]

    def _joined(self, states: Iterable[TensorState]) -> TensorState:
        states = list(states)
        unknown = next((state for state in states if state.kind == UNKNOWN), None)
        return total(states) if unknown is None else unknown

    def _loop(self, operation: Any, inputs: list[TensorState]) -> list[TensorState]:
        condition, body = graphs.functions_of(operation)
        states, before = list(inputs), dict(self.changes)
        for _ in range(10):
            failures, changes = len(self.failures), dict(self.changes)
            results = self._call(body, states)
            merged = [
                _with_axis(self._joined(pair), pair) for pair in zip(states, results, strict=True)
            ]
            if merged == states and self.changes == changes:
                break
            del self.failures[failures:]  # the body is read again, with other states
            states = merged
        else:
            raise Coupled("is a loop whose values do not settle")
        self.changes = _united(before, self.changes)
        (repeats,) = self._call(condition, states)
        if repeats.kind == UNKNOWN:
            reason: Reason = repeats.of
            raise Coupled(f"is a loop whose end depends on rows: {reason.text}")
        if not (repeats.kind == WHOLE and not repeats.power):
            raise Coupled("is a loop whose end depends on rows")
        return states

    # ---------------------------------------------------------------------------------- variables
    def _assign(self, operation: Any, inputs: list[TensorState]) -> None:
        handle, value = inputs[0], inputs[-1]
        key, kind = handle.of, operation.type
        if kind.startswith("ResourceScatter"):
            adds = kind in ("ResourceScatterAdd", "ResourceScatterSub")
            if all(state.is_plain() and state.kind == WHOLE for state in inputs[1:]):
                return
            if not adds or not all(state.is_plain() for state in inputs[1:]):
                raise Coupled("writes rows to a variable")
            self._change(key, _SUM)
            return
        if value.kind == WHOLE and not value.power:
            if kind == "AssignVariableOp":  # it replaces what rows have changed
                self.changes.pop(key, None)
            return
        if kind == "AssignVariableOp":
            if value.kind == PARTIAL and value.power in (-1, None):
                self._change(key, _MEAN)
                return
            if value.kind == CHANGED and value.of == key:
                self._change(key, _SUM)
                return
            raise Coupled("assigns to a variable what depends on rows")
        self._change(key, _kind_of_addend(value))

    def _change(self, key: Any, kind: str) -> None:
        if self.changes.setdefault(key, kind) != kind:
            raise Coupled("adds to a variable a sum and a mean over rows")

    def _added_to(self, operation: Any, inputs: Sequence[TensorState]) -> TensorState | None:
        """Returns the state of `variable + sum over rows`, None for anything else."""
        for place in (0, 1) if operation.type != "Sub" else (0,):
            read, added = inputs[place], inputs[1 - place]
            source = _behind_casts(operation.inputs[place])
            is_sum = added.kind == PARTIAL and not added.power
            is_sum |= added.kind == WHOLE and added.power == 1
            if is_sum and read == EQUAL and source.type == "ReadVariableOp":
                return TensorState(CHANGED, of=self.of(source.inputs[0]).of)
        return None


def _united(one: dict[Any, str], other: dict[Any, str]) -> dict[Any, str]:
    """Returns the changes of code of which only a part runs."""
    if any(other.get(key, kind) != kind for key, kind in one.items()):
        raise Coupled("adds to a variable a sum or a mean over rows")
    return {**one, **other}


def _kind_of_addend(value: TensorState) -> str:
    if value.kind == PARTIAL and not value.power:
        return _SUM
    if value.kind == WHOLE and value.power == 1:  # the number of rows
        return _SUM
    if value.kind == PARTIAL and value.power == -1:
        return _MEAN
    raise Coupled("adds to a variable what depends on rows")


def _behind_casts(tensor: Any) -> Any:
    """Returns the operation that made a tensor, or the one whose result it is without a loss."""
    while tensor.op.type in ("Identity", "StopGradient") or (
        tensor.op.type == "Cast" and rules.keeps_sums(tensor.op)
    ):
        tensor = tensor.op.inputs[0]
    return tensor.op


def _by_rule(rule: rules.Rule, step: _RuleArguments) -> list[TensorState] | TensorState:
    """Applies a rule. Raises `Coupled` if it does not know of an input that depends on rows."""
    operation = step.operation
    lengths = rules.LENGTHS.get(operation.type, ())
    shapes = (*lengths, *rules.ELEMENT_SHAPES.get(operation.type, ()))
    for place, state in enumerate(step.states):
        is_shape = place in shapes and _is_number(state)
        if state.kind not in rules.TAKES[operation.type] and not is_shape:
            raise Coupled(_OTHER_KINDS.get(state.kind, "takes no such input"))
        if is_shape and place in lengths and not _are_known(operation.outputs):
            raise Coupled("makes a tensor of an unknown shape from the number of rows")
    found = rule(step)
    for place, state in step.unread():
        is_equal = state.kind == HANDLE or (state.kind == WHOLE and not state.power)
        if not (is_equal or (place in shapes and _is_number(state))):
            raise Coupled("takes more than its data from rows, or from their number")
    if rule in rules.BROADCASTING:
        _check_broadcast(operation, step.states)
    return found


def _check_broadcast(operation: Any, states: Sequence[TensorState]) -> None:
    """Refuses a whole value that may be as long as the batch by chance, beside its rows."""
    shapes = [tensor.shape for tensor in operation.inputs]
    along = [
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


def _is_number(state: TensorState) -> bool:
    """Returns True for numbers and shapes made from the number of rows."""
    return state.kind == COUNTED or (state.kind == WHOLE and bool(state.power))


def _with_axis(state: TensorState, pair: Sequence[TensorState]) -> TensorState:
    """Refuses loop variables whose rows change their axis."""
    rows = [each for each in pair if each.is_rows]
    if len(rows) == 2 and rows[0].axis != rows[1].axis:
        raise Coupled("moves rows to another axis from turn to turn")
    return state


def _exchanged(state: TensorState) -> TensorState:
    """Returns the state of a sum or mean over rows after workers have added their parts."""
    if state.kind == PARTIAL and state.power in (0, -1, None):
        return EQUAL
    if state.kind == WHOLE and state.power in (0, 1, None):
        return EQUAL
    raise Coupled("exchanges what is no sum over rows")


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


class _RuleArguments:
    """One operation; see `rules.RuleArguments`."""

    def __init__(self, reader: Reader, operation: Any, inputs: list[TensorState]) -> None:
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


def unknown_in(states: Iterable[TensorState]) -> Reason | None:
    """Returns the reason of the first unknown state."""
    for state in states:
        if state.kind == UNKNOWN:
            reason: Reason = state.of
            return reason
        if state.kind in (LIST, NOTHING):
            break
    return None
