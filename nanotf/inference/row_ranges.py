"""Divides the rows of `Program.predict` into batches, and between worker processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nanotf.errors import check_integer
from nanotf.parent.map.mapping import imap

Outputs = dict[str, np.ndarray[Any, Any]]

# Ranges per worker: one that is slower than the others may compute fewer of them. Each takes some
# 20 ms beside its rows, since `nanotf.map` resets a worker before an item.
_RANGES = 2


class Computes(Protocol):
    """A program."""

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """Computes one batch."""


# How a worker opens a program: a function and its arguments. Equal arguments open the same program.
Opening = tuple[Callable[..., Computes], tuple[Any, ...]]


def in_batches(
    program: Computes, inputs: Mapping[str, np.ndarray[Any, Any]], rows: range, size: int
) -> Outputs:
    """Computes a range of rows, `size` at a time; no rows as one batch of none."""
    starts = rows[::size] or [rows.start]  # an empty batch gives the outputs' shapes and dtypes
    found = []
    for start in starts:
        end = min(start + size, rows.stop)
        found.append(program.run({name: array[start:end] for name, array in inputs.items()}))
    return _joined(found)


def on_workers(
    opening: Opening,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    rows: int,
    size: int,
    num_processes: int,
    cores_per_process: int | None,
) -> Outputs:
    """Computes all rows on worker processes.

    Raises:
        NanoError: As `nanotf.map`.
    """
    count = check_integer("num_processes", num_processes, "Pass a number of worker processes")
    ranges = divide(rows, size, count * _RANGES)
    # Workers map the arrays of `shared`; each item would bring a copy.
    shared = {"opening": opening, "inputs": dict(inputs), "size": size}
    with imap(
        _compute_range,
        ranges,
        count,
        cores_per_process=cores_per_process,
        shared=shared,
        ordered=True,
        memory_limit=None,  # a replaced worker would load the program again
    ) as results:
        return _joined(results.all())


def divide(rows: int, size: int, parts: int) -> list[range]:
    """Divides rows into ranges of whole batches, at most `parts`, of about equal lengths."""
    batches = -(-rows // size)
    count = max(1, min(parts, batches))
    # Whole batches, since rows may depend on their batch: those of one process have the same ones.
    bounds = [min(rows, batches * i // count * size) for i in range(count + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def _joined(found: Sequence[Outputs]) -> Outputs:
    if len(found) == 1:
        return found[0]  # no copy
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


# --------------------------------------------------------------------------- in a worker
_opened: dict[Opening, Computes] = {}  # the latest


def _compute_range(
    rows: range, opening: Opening, inputs: Mapping[str, np.ndarray[Any, Any]], size: int
) -> Outputs:
    return in_batches(opened(opening), inputs, rows, size)


def opened(opening: Opening) -> Computes:
    """Returns a program, opened now or in an earlier call. A process keeps the latest."""
    if opening not in _opened:
        _opened.clear()  # before the next is loaded: its memory is needed
        function, arguments = opening
        _opened[opening] = function(*arguments)
    return _opened[opening]
