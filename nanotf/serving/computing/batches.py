"""Rows of several requests, computed at once where that gives each the same results as alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.serving.interface import Decoded

Arrays = Mapping[str, np.ndarray[Any, Any]]
Compute = Callable[[Arrays, str], Arrays]


def groups(
    requests: Sequence[tuple[int, Decoded]], are_apart: Callable[[str], bool]
) -> Iterator[list[tuple[int, Decoded]]]:
    """Yields the requests that may be computed together, in the order of the first of each group.

    Rows of other lengths or types are not mixed.

    Args:
        requests: each with its place.
        are_apart: returns True for a signature whose rows do not depend on each other.
    """
    found: dict[Any, list[tuple[int, Decoded]]] = {}
    for place, decoded in requests:
        alone = not decoded.rows or not are_apart(decoded.signature)
        key: Any = place  # a group of its own
        if not alone:
            key = decoded.signature, *[(a.dtype, a.shape[1:]) for a in decoded.inputs.values()]
        found.setdefault(key, []).append((place, decoded))
    yield from found.values()


def computed(group: Sequence[Decoded], most: int | None, compute: Compute) -> list[Arrays]:
    """Computes the outputs of requests that `groups` has put together.

    Args:
        most: rows that are computed at once; None for all, where rows depend on each other.

    Returns:
        The outputs of each request.

    Raises:
        Exception: What the model raises.
        RowsLost: The outputs do not have the rows of the inputs.
    """
    if most is None or (len(group) == 1 and (group[0].rows or 0) <= most):
        return [compute(each.inputs, each.signature) for each in group]
    rows = [decoded.rows or 0 for decoded in group]
    joined = {name: _joined([d.inputs[name] for d in group]) for name in group[0].inputs}
    outputs = _in_parts(joined, sum(rows), most, lambda part: compute(part, group[0].signature))
    ends = list(itertools.accumulate(rows))
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for count, end in zip(rows, ends, strict=True)
    ]


class RowsLost(Exception):
    """An output has not one row for each row of the inputs."""


def _in_parts(
    inputs: Arrays, rows: int, most: int, compute: Callable[[Arrays], Arrays]
) -> dict[str, np.ndarray[Any, Any]]:
    parts = []
    for begin in range(0, rows, most):
        end = min(begin + most, rows)
        part = compute({name: array[begin:end] for name, array in inputs.items()})
        for name, array in part.items():
            if array.shape[:1] != (end - begin,):
                raise RowsLost(name)
        parts.append(part)
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
