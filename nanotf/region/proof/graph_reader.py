"""Reads the graph of a call and gives each tensor a `TensorState`, by the rule of its operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import graphs
from nanotf.region.proof import row_numbers, rule_steps, rules
from nanotf.region.proof.row_constants import RowConstants
from nanotf.region.proof.states import (
    CHANGED,
    COUNT,
    COUNTED,
    EQUAL,
    HANDLE,
    PARTIAL,
    ROWS,
    UNKNOWN,
    WHOLE,
    Coupled,
    Reason,
    TensorState,
    total,
)

_SMALL = 64  # elements of a value that is computed here
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_ADDS = ("Add", "AddV2", "Sub")
_SUM, _MEAN = "sum", "mean"


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
        self._constants = RowConstants(rows, other_rows)
        self.states: dict[int, TensorState] = {}
        self.kept: set[int] = set()  # ids of tensors whose states are given
        self.exchanged: set[int] = (
            set()
        )  # ids of tensors that workers exchange: the sums of partial ones
        self.failures: list[Reason] = []
        self.changes: dict[Any, str] = {}
        self._values: dict[int, Any] = {}  # by `id` of a tensor; None if it is no small constant
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
            if unknown is not None and operation.type != "Assert":  # it changes no value
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
        # All workers have the same variables, and the check above refuses a changed one.
        if kind == "ReadVariableOp":
            return EQUAL
        numbers = [place for place, state in enumerate(inputs) if rule_steps.is_number(state)]
        if numbers and not row_numbers.may_take_numbers(operation, numbers):
            raise Coupled("uses the number of rows")
        follows = not numbers or row_numbers.follows_numbers(operation, numbers)
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
                return rule_steps.by_rule(rule, rule_steps.RuleStep(self, operation, inputs))
        except Coupled:
            # Whatever the rule refuses, equal inputs give equal results.
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
            # Rows may lie along any axis: two places make the state unknown below.
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
            found.append(self._constants.state_of(value, other))
        return found

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
        if other is None:  # made for the gradient, see `RowConstants`
            return (np.mod(value, self.rows) == 0) & (value != 0)
        if np.size(other) != np.size(value):
            raise Coupled("has a shape that depends on the number of rows")
        return np.ravel(other) != value

    # --------------------------------------------------------------------------- functions in graphs
    def _call(self, graph: Any, inputs: Sequence[TensorState]) -> list[TensorState]:
        self._forget(graph)  # another call of it may have had other inputs
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
            self.changes = dict(before)  # only one of the branches will run
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
            # Workers' means, weighed by their shares of the rows, add up to the batch's mean.
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
        # A sum minus a variable is no addition to it.
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
        tensor.op.type == "Cast" and row_numbers.keeps_sums(tensor.op)
    ):
        tensor = tensor.op.inputs[0]
    return tensor.op


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
