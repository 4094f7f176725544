"""Chooses the partition of each operation of a traced call (`auto_partition`).

The operations come in the order of the call. What a layer makes stays together, and so do the uses
of a variable with all that is between them. The pieces that are left are divided by the bytes of
their variables and by the time that rank 0 measures for their forward passes (`piece_times`). Where
it cannot, as with unknown shapes, an estimate replaces the times: floating-point operations and
bytes written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import graphs
from nanotf.sagemaker.smp import balance, piece_times, runtime
from nanotf.sagemaker.smp.config import Config
from nanotf.sagemaker.smp.cut import EVERYWHERE, everywhere
from nanotf.sagemaker.smp.trace import TracedCall

_TIMES = "smp: auto_partition"  # tag of a message


def assign(traced: TracedCall, config: Config, fixed: Mapping[int, int]) -> dict[str, int | None]:
    """Returns the partition of each operation.

    Args:
        fixed: the partition of each variable of an earlier cut, by the id of its handle.

    Raises:
        ModelError: The call cannot be divided into so many parts.
    """
    free = everywhere(traced)
    operations = [op for op in traced.operations if op.name not in free]
    places = {op.name: place for place, op in enumerate(operations)}
    uses = _uses(traced, places)
    bounds = _bounds(len(operations), [*_spans(traced, places), *uses.values()])
    numbers = [number for number, (a, b) in enumerate(bounds) for _ in range(a, b)]
    groups = [operations[begin:end] for begin, end in bounds]
    # A first cut decides where the variables are.
    times = [] if fixed else _measured(traced, groups, free)
    costs = times or _estimated(traced, groups)
    pieces = _pieces(traced, operations, numbers, uses, fixed, costs)
    parts = balance.divide(pieces, config.partitions, config.memory_weight)
    found: dict[str, int | None] = dict.fromkeys(free, EVERYWHERE)
    found.update({op.name: parts[numbers[places[op.name]]] for op in operations})
    return found


def _measured(
    traced: TracedCall, groups: Sequence[Sequence[Any]], free: Collection[str]
) -> list[float]:
    """Returns what rank 0 measures, on all ranks, so that they divide alike; empty if it cannot."""
    box, place = runtime.mailbox(), runtime.place()
    if place.rank > 0:  # of all copies of the model: they are cut alike
        (received,) = box.receive(0, _TIMES, "smp: times for auto_partition")
        return [float(seconds) for seconds in received]
    found = piece_times.seconds(traced, groups, free) or []
    box.send_to_all([*range(1, place.size)], _TIMES, [np.array(found)])
    return found


def _estimated(traced: TracedCall, groups: Sequence[Sequence[Any]]) -> list[float]:
    """Returns floating-point operations, where known, and bytes written."""
    work = graphs.float_operations(traced.function.graph)
    return [
        float(sum(work.get(op.name, 0) + sum(map(_bytes, op.outputs)) for op in group))
        for group in groups
    ]


def _uses(traced: TracedCall, places: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """Returns the first and the last place of each variable's uses, by the id of its handle."""
    resources = traced.resources()
    found: dict[int, tuple[int, int]] = {}
    for op in traced.operations:
        for part in op.inputs:
            if id(part) in resources:
                handle, here = id(resources[id(part)]), places[op.name]
                found[handle] = (found.get(handle, (here, here))[0], here)
    return found


def _spans(traced: TracedCall, places: Mapping[str, int]) -> list[tuple[int, int]]:
    """Returns the first and the last place of what each layer makes."""
    found = []
    for names in traced.layers:
        inside = [places[name] for name in names if name in places]
        if inside:
            found.append((min(inside), max(inside)))
    return found


def _bounds(count: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the begins and ends of pieces; no span has parts in two."""
    joined = [False] * (count + 1)  # whether a place is in one piece with the one before it
    for first, last in spans:
        for place in range(first + 1, last + 1):
            joined[place] = True
    begins = [place for place in range(count) if not joined[place]]
    return list(zip(begins, [*begins[1:], count], strict=True))


def _pieces(
    traced: TracedCall,
    operations: Sequence[Any],
    numbers: Sequence[int],
    uses: Mapping[int, tuple[int, int]],
    fixed: Mapping[int, int],
    costs: Sequence[float],
) -> list[balance.Piece]:
    sizes, crossing = [0] * len(costs), [0] * len(costs)
    parts: dict[int, int] = {}
    variables = {id(v.handle): v for v in traced.function.graph.variables}
    for handle, (first, _) in uses.items():
        if handle in variables:
            # A variable's uses are all in one piece, so the first place tells which.
            sizes[numbers[first]] += _bytes(variables[handle])
        if handle in fixed:
            parts[numbers[first]] = fixed[handle]
    where = {op.name: number for op, number in zip(operations, numbers, strict=True)}
    for op, number in zip(operations, numbers, strict=True):
        for part in op.outputs:
            readers = [where[reader.name] for reader in part.consumers() if reader.name in where]
            # Counted once at each cut before its last reader, however many read it.
            for later in range(number + 1, max(readers, default=number) + 1):
                crossing[later] += _bytes(part)
    return [
        balance.Piece(*values, fixed=parts.get(number))
        for number, values in enumerate(zip(sizes, costs, crossing, strict=True))
    ]


def _bytes(tensor: Any) -> int:
    """Returns the bytes of a tensor or variable of known shape; unknown lengths count as 1."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer) or tensor.shape.rank is None:
        return 0
    total = int(tensor.dtype.size)
    for length in tensor.shape.as_list():
        total *= 1 if length is None else length
    return total
