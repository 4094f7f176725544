"""Compares a call's graph for large numbers of rows with its graph for those that really come.

A proof traces with large primes. Python code of a layer that sees a number of rows may do something
else for a small one: `x if x.shape[0] < 32 else x - tf.reduce_mean(x, 0)`. So where the batch has a
known number of rows, the call is traced with it, too, and with the numbers that workers compute.
Nothing but lengths and numbers proportional to the rows may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanotf.compat import graphs
from nanotf.region.proof.states import Coupled
from nanotf.region.proof.traces import Trace

# TensorFlow fills a small tensor at once, a large one by an operation.
_FILLED = ("Const", "Fill")
# Kinds of attributes. Shapes are compared by `_agree`, functions by their own operations.
_COMPARED = ("int", "list(int)", "float", "list(float)", "bool", "list(bool)", "string")


def check(one: Trace, two: Trace, other: Trace) -> None:
    """Compares a trace with two that consist of the same operations.

    Args:
        one, two: the traces with large numbers of rows.
        other: the trace with another number.

    Raises:
        Coupled: Its code is another.
    """
    rows = tuple(trace.tracing.rows for trace in (one, two, other))
    found = [list(_operations(trace)) for trace in (one, two, other)]
    numbers = [list(_numbers(trace)) for trace in (one, two, other)]
    counts = {len(made) for made in found}, {len(made) for made in numbers}
    if any(len(count) > 1 for count in counts):
        raise Coupled(f"its operations are others for {rows[2]} rows")
    for operations in zip(*found, strict=True):
        if _attributes(operations[0]) != _attributes(operations[2]):
            raise Coupled(f"its operations are others for {rows[2]} rows: {operations[2].type}")
        for tensors in zip(*(operation.outputs for operation in operations), strict=True):
            shapes = [tensor.shape for tensor in tensors]
            ranks = {shape.rank for shape in shapes}
            axes = () if None in ranks or len(ranks) > 1 else zip(*shapes, strict=True)
            if len(ranks) > 1 or not all(_agree(sizes, rows) for sizes in axes):
                raise Coupled(f"its shapes are others for {rows[2]} rows: {operations[2].type}")
    for values in zip(*numbers, strict=True):
        if not _agree(values, rows):
            raise Coupled(f"it uses another number for {rows[2]} rows: {values[2]}")


def _operations(trace: Trace) -> Iterator[Any]:
    for operation in graphs.all_operations(trace.graph):
        if operation.type not in _FILLED:
            yield operation


def _numbers(trace: Trace) -> Iterator[Any]:
    """Yields the values of scalars, but those that fill tensors."""
    for operation in graphs.all_operations(trace.graph):
        if operation.type == "Const" and operation.outputs[0].shape.rank == 0:
            users = operation.outputs[0].consumers()
            if not users or any(user.type not in _FILLED for user in users):
                yield graphs.constant(operation.outputs[0], lambda _: None, 1).item()


def _attributes(operation: Any) -> Any:
    names = [a.name for a in operation.op_def.attr if a.type in _COMPARED]
    return operation.type, [operation.get_attr(name) for name in names]


def _agree(values: tuple[Any, ...], rows: tuple[int, ...]) -> bool:
    """Returns True for a value that is equal, or follows one rule of the number of rows."""
    if _are_nan(values):
        return True
    if values[0] == values[1] or not all(isinstance(value, (int, float)) for value in values):
        return bool(values[0] == values[2])
    one, two, other = values
    linear = one + (two - one) * (rows[2] - rows[0]) / (rows[1] - rows[0])
    if math.isclose(linear, other, rel_tol=1e-6, abs_tol=1e-9):
        return True
    if one * two <= 0:  # no power of the number of rows
        return False
    power = math.log(two / one) / math.log(rows[1] / rows[0])
    return math.isclose(one * (rows[2] / rows[0]) ** power, other, rel_tol=1e-5)


def _are_nan(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, float) and np.isnan(value) for value in values)
