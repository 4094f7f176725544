"""Rules of operations that change shapes, choose parts, or put them together."""

from __future__ import annotations

import math
from typing import Any

from nanotf.region.proof.rule_table import (
    RuleArguments,
    attribute,
    crosses,
    is_equal,
    is_real,
    rule,
)
from nanotf.region.proof.states import (
    CHANGED,
    COUNT,
    COUNTED,
    EQUAL,
    HANDLE,
    LIST,
    PARTIAL,
    ROWS,
    WHOLE,
    Coupled,
    TensorState,
    plain,
    product,
    total,
)


@rule("Shape ShapeN Size", CHANGED, COUNTED, HANDLE, LIST)
def _shape(step: RuleArguments) -> list[TensorState]:
    return [EQUAL if state.kind in (WHOLE, PARTIAL) else COUNT for state in step.inputs]


@rule("Rank", CHANGED, COUNTED, HANDLE, LIST)
def _rank(step: RuleArguments) -> TensorState:
    step.ignores(0)
    return EQUAL


@rule("Fill BroadcastTo", COUNTED)
def _broadcast(step: RuleArguments) -> TensorState:
    state = step.inputs[1 if step.operation.type == "Fill" else 0]
    if state.is_rows or state.kind == PARTIAL:
        return state  # with a second axis of rows, it is unknown
    has_rows = any(d is not None and d % step.rows == 0 for d in step.out_shape())
    return TensorState(ROWS, state.power, each=0) if has_rows and state.kind == WHOLE else state


@rule("Range", COUNTED)
def _range(step: RuleArguments) -> TensorState:
    states = list(step.inputs)
    if all(map(is_equal, states)):
        return EQUAL
    length = step.out_shape()[0]
    if is_real(step) or not length or length % step.rows:
        # Such as a range in steps of 5000, which has one number for few rows.
        raise Coupled("makes a range that is not as long as the rows")
    return COUNT


@rule("Tile", COUNTED)
def _tile(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.is_rows and step.value(1)[state.axis] != 1:
        raise Coupled("repeats the rows")
    if state.kind == WHOLE:
        repeats = [int(n) for n in step.value_by_rows(1)[0]]  # the result's shape shows them
        if any(n % step.rows == 0 for n in repeats):
            return TensorState(ROWS, state.power, each=0)
    return state


@rule("ExpandDims Transpose ConjugateTranspose", COUNTED)
def _move(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@rule("Squeeze", COUNTED)
def _squeeze(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.is_rows and not attribute(step, "squeeze_dims"):
        raise Coupled("removes the axis of the rows if there is one row")
    return state


@rule("Reshape", COUNTED)
def _reshape(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if not state.is_rows:
        return state
    before, after = step.shape(0), step.out_shape()
    if None in before or None in after:
        raise Coupled("reshapes to an unknown shape")
    sizes: Any = (before, after)
    outer = math.prod(sizes[0][: state.axis])
    axis = next((i for i, d in enumerate(after) if d and d % step.rows == 0), None)
    if axis is None:
        raise Coupled("reshapes rows away")
    outer_after = math.prod(sizes[1][:axis])
    each_after = after[axis] // step.rows  # type: ignore[operator]
    # The elements of the whole tensor are ordered as (a, rows, b), each of a and b of any shape.
    if state.strided and state.each > 1:
        outer *= state.each
    if outer_after == outer:
        return TensorState(ROWS, state.power, each=each_after)
    if outer == outer_after * each_after:
        return TensorState(ROWS, state.power, each=each_after, strided=True)
    raise Coupled("reshapes the rows into others")


@rule("Pack", COUNTED)
def _pack(step: RuleArguments) -> TensorState:
    return total(step.inputs)


@rule("Unpack Split SplitV", COUNTED)
def _split(step: RuleArguments) -> list[TensorState]:
    place = 1 if step.operation.type == "Split" else 0
    axis = (
        attribute(step, "axis")
        if step.operation.type == "Unpack"
        else step.value(0 if place else 2)
    )
    if step.inputs[place].is_rows and crosses(step, axis, place):
        raise Coupled("splits the rows")
    return [step.inputs[place]] * len(step.operation.outputs)


@rule("ConcatV2", COUNTED)
def _concat(step: RuleArguments) -> TensorState:
    last = len(step.inputs) - 1
    axis = step.value(last)
    if any(crosses(step, axis, place) for place in range(last)):
        raise Coupled("puts rows after rows")
    return total(step.inputs[:last])


def _keeps_all(step: RuleArguments, state: TensorState) -> bool:
    """Returns True if the result has as many rows as the input."""
    length = step.rows * state.each
    return length in step.out_shape() and step.shape(0)[state.axis] == length


def _entry_of(step: RuleArguments, axis: int, rank: int) -> int | None:
    """Returns the place of an axis in the begin, end and strides of a slice; None if it has none."""
    masks = [attribute(step, name) for name in ("ellipsis_mask", "new_axis_mask")]
    places = range(len(step.value(3)))
    dots, new = ([place for place in places if mask >> place & 1] for mask in masks)
    new = [place for place in new if place not in dots]  # as TensorFlow, which looks for dots first
    at = 0
    for place in places:
        if place in dots:
            at += rank - (len(places) - len(dots) - len(new))
        elif place not in new:
            if at == axis:
                return place
            at += 1
    return None


def _check_slice(step: RuleArguments, axis: int, rank: int, length: int) -> None:
    """Raises `Coupled` unless a slice keeps all rows, for any number of them, and cuts them alike.

    A begin or an end outside the axis is clamped, so that a shape does not show it.
    """
    entry = _entry_of(step, axis, rank)
    for place, name in ((1, "begin_mask"), (2, "end_mask")):
        is_open = entry is None or attribute(step, name) >> entry & 1
        if is_open and is_equal(step.inputs[place]):
            continue
        value, varies = step.value_by_rows(place)
        if not is_open:
            is_all = (
                varies[entry] and value[entry] == length
                if name == "end_mask"
                else value[entry] == 0
            )
            if not is_all:
                raise Coupled("takes some of the rows")
            varies[entry] = False
        if varies.any():
            raise Coupled("takes a part that depends on the number of rows")


@rule("StridedSlice Slice Pad PadV2 MirrorPad MirrorPadGrad", COUNTED)
def _slice(step: RuleArguments) -> TensorState:
    state, kind = step.inputs[0], step.operation.type
    padding = step.inputs[2] if kind == "PadV2" else None  # of a sum, workers would add it each
    if padding is not None and padding.power is not None:
        plain([state, padding])
    if state.kind == COUNTED:
        return plain(step.inputs[1:]) and COUNT  # `plain` only checks: a state is always true
    if not state.is_rows:
        return state
    # A negative stride reverses the rows, which a shape does not show.
    if not _keeps_all(step, state) or (kind == "StridedSlice" and min(step.value(3)) < 0):
        raise Coupled("takes some of the rows, or adds others")
    if kind == "StridedSlice":
        _check_slice(step, state.axis, len(step.shape(0)), step.rows * state.each)
    if kind == "Slice" and not is_equal(step.inputs[2]):
        _, varies = step.value_by_rows(2)
        varies[state.axis] = False
        if varies.any():
            raise Coupled("takes a part that depends on the number of rows")
    return state


@rule("StridedSliceGrad", COUNTED)
def _slice_gradient(step: RuleArguments) -> TensorState:
    state = step.inputs[4]
    if state.is_rows and (step.rows * state.each not in step.out_shape() or min(step.value(3)) < 0):
        raise Coupled("takes some of the rows")
    if state.is_rows:
        shape, length = step.out_shape(), step.rows * state.each
        _check_slice(step, shape.index(length), len(shape), length)
    return state


@rule("SpaceToBatchND BatchToSpaceND")
def _blocks(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if not state.is_rows:
        return state
    if state.axis:
        raise Coupled("works along the rows")
    # The places in a block come first, then the rows, in the result and in the input that has them.
    is_first = state.strided or state.each == 1
    each = (step.out_shape()[0] or 0) // step.rows
    if not is_first or not each:
        raise Coupled("mixes several rows for each row of the batch")
    return TensorState(ROWS, state.power, each=each, strided=True)


@rule("ReverseSequence")
def _reverse_sequence(step: RuleArguments) -> TensorState:
    if crosses(step, attribute(step, "seq_dim")):
        raise Coupled("works along the rows")
    lengths = step.inputs[1]
    if lengths.is_rows and (lengths.each > 1 or not crosses(step, attribute(step, "batch_dim"))):
        raise Coupled("works along the rows")
    return product(plain([lengths]), step.inputs[0])
