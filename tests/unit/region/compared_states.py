"""Compares what the proof says of drawn operations with their values on whole batches and parts.

A program: `compared_states.py SEED NUMBER` draws so many operations of each kind that has a rule.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from drawn_operations import INPUTS, WHOLE_INPUTS, Drawing, placeholders, values_of_inputs
from tensorflow.python.framework import op_def_registry

from nanotf.region.proof import rules, states, traces, verdicts

DIVISIONS = ((2, 2), (1, 3), (2, 3), (1, 1, 3), (1, 1))  # the rows of each worker
NOT_DRAWN = {
    # TensorFlow ends the process if a length is 0.
    *("IRFFT", "IRFFT2D", "RFFT", "RFFT2D"),
    # It does not check its inputs, and reads or returns memory of other code.
    *("AvgPool3DGrad", "AvgPoolGrad", "Cholesky"),
}


def read(drawing: Drawing, number: int, kinds: list[str]) -> tuple[list[Any], Any]:
    """Draws operations; returns the tensors, and the proof's reader of their states."""
    rows, other = traces.SIZES[0]
    with tf.Graph().as_default():
        given = placeholders(rows)
        tensors = drawing.tensors_of(given)
        for kind in kinds:
            drawing.draw(kind, tensors, number, 300)
    with tf.Graph().as_default():
        given = placeholders(other)
        drawing.forget_missing(drawing.build(given))
    leaves = [traces.Argument(shape, dtype, True) for shape, dtype in INPUTS.values()]
    leaves += [traces.Argument(shape, dtype, False) for shape, dtype in WHOLE_INPUTS.values()]
    made: list[list[Any]] = []

    def call(*inputs: Any) -> Any:
        made.append(drawing.build(dict(zip([*INPUTS, *WHOLE_INPUTS], inputs, strict=True))))
        return [], {}

    trace = functools.partial(traces.trace, call, list, (tuple(leaves), {}), leaves)
    traced, again = trace(rows), trace(other)
    return made[0], verdicts.read(traced, again)


def rows_of(value: Any, state: states.TensorState, start: int, stop: int, rows: int) -> Any:
    """Returns the part of a value that belongs to some rows of the batch."""
    split = (state.each, rows) if state.strided else (rows, state.each)
    shape = value.shape
    value = value.reshape((*shape[: state.axis], *split, *shape[state.axis + 1 :]))
    along = state.axis + 1 if state.strided else state.axis
    value = np.take(value, range(start, stop), along)
    own = (stop - start) * state.each
    return value.reshape((*shape[: state.axis], own, *shape[state.axis + 1 :]))


def scaled(value: Any, share: float, power: Any) -> Any:
    if not power:
        return value
    value = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
    return value * share ** float(power)


def are_close(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fciu":
        return bool((one == other).all())
    return bool(np.allclose(one, other, rtol=2e-3, atol=1e-4, equal_nan=True))


def contradicts(state: states.TensorState, whole: Any, parts: list[Any], sizes: Any) -> bool:
    """Returns True if the parts of a tensor are not what its state says of them."""
    rows, start, together = sum(sizes), 0, 0
    for part, size in zip(parts, sizes, strict=True):
        share = size / rows
        if state.kind == states.WHOLE and not are_close(part, scaled(whole, share, state.power)):
            return True
        if state.is_rows:
            if whole.shape[state.axis] != rows * state.each:
                return True
            own = rows_of(whole, state, start, start + size, rows)
            if not are_close(part, scaled(own, share, state.power)):
                return True
        if state.kind == states.PARTIAL:
            together = together + scaled(part, share, -(state.power or 0))
        start += size
    return state.kind == states.PARTIAL and not are_close(together, whole)


def unsound(seed: int, number: int) -> tuple[set[str], list[str]]:
    """Returns the kinds of operations that were compared, and those with a wrong state."""
    drawing = Drawing(seed)
    kinds = [
        kind
        for kind in rules.RULES
        if op_def_registry.get(kind) is not None and kind not in NOT_DRAWN
    ]
    random.Random(seed).shuffle(kinds)
    tensors, reader = read(drawing, number, kinds)
    places = {
        place: operation
        for operation in drawing.operations
        for place in operation.results
        if tensors[place] is not None
        and reader.of(tensors[place]).kind in (states.WHOLE, states.ROWS, states.PARTIAL)
        and tensors[place].dtype not in (tf.variant, tf.resource)
    }

    def computed(rows: int, start: int, stop: int) -> dict[int, Any]:
        """Computes the tensors of some rows of a batch, without those that cannot be computed."""
        own = {k: v[start:stop] if k in INPUTS else v for k, v in batches[rows].items()}
        found = drawing.build({name: tf.constant(value) for name, value in own.items()})
        return {place: found[place].numpy() for place in places if found[place] is not None}

    batches = {sum(sizes): values_of_inputs(sum(sizes), seed) for sizes in DIVISIONS}
    whole = {rows: computed(rows, 0, rows) for rows in batches}
    compared, wrong = set(), []
    for sizes in DIVISIONS:
        ends = [int(end) for end in np.cumsum(sizes)]
        parts = [computed(ends[-1], e - size, e) for size, e in zip(sizes, ends, strict=True)]
        for place, operation in places.items():
            values = [each.get(place) for each in (whole[ends[-1]], *parts)]
            if any(value is None for value in values):
                continue
            compared.add(operation.kind)
            state = reader.of(tensors[place])
            if contradicts(state, values[0], values[1:], sizes):
                given = [f"{t.op.type} {t.shape} {reader.of(t)}" for t in tensors[place].op.inputs]
                wrong.append(f"{operation.kind} {sizes} {state} of {given}")
    return compared, wrong


if __name__ == "__main__":
    kinds_compared, contradictions = unsound(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"compared": sorted(kinds_compared), "wrong": contradictions}))
