"""The numbers of a program's steps, written to a file for `nanotf compare`.

The process that runs the steps writes: the user's, or the worker of rank 0. Workers inherit the
variables below.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

FILE = "NANOTF_RECORD"  # the path of the file
CHECK_LAYERS = "NANOTF_CHECK_LAYERS"  # set if workers compare each layer's parts with the whole

_calls: collections.Counter[str] = collections.Counter()


def is_on() -> bool:
    """Returns True if the numbers of this program are recorded."""
    return FILE in os.environ


def checks_layers() -> bool:
    """Returns True if workers compare each layer that they divide with a call on all rows."""
    return CHECK_LAYERS in os.environ


def note_call(name: str, value: Any) -> None:
    """Records the numbers that a call returned.

    Args:
        name: of the function; calls of one name are counted.
        value: a structure; only numbers, arrays and tensors count.
    """
    if not is_on():
        return
    from nanotf.compat.versions import require_tensorflow

    _calls[name] += 1
    leaves = require_tensorflow().nest.flatten(value)
    note(
        f"call {_calls[name]} of {name}",
        {f"value {place} of what it returns": leaf for place, leaf in enumerate(leaves)},
    )


def note(where: str, values: Mapping[str, Any]) -> None:
    """Records numbers.

    Args:
        where: the moment, for people.
        values: by name; others than numbers are left out.
    """
    numbers = {name: found for name, value in values.items() if (found := summary(value))}
    write({"where": where, "values": numbers})


def note_layer(layer: str, what: str) -> Callable[..., None]:
    """Returns a function of a value on all rows and one on each worker's, to record both.

    Args:
        layer: its name and class.
        what: names the value, such as an output.
    """

    def differ(whole: Any, divided: Any) -> None:
        write({"layer": layer, "what": what, "whole": float(whole), "divided": float(divided)})

    return differ


def write(line: Mapping[str, Any]) -> None:
    """Appends a line to the file."""
    with pathlib.Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def summary(value: Any) -> list[float]:
    """Returns a scale of an array's numbers, their sum, norm and a sum that tells their order.

    Empty if the value has no numbers.
    """
    if isinstance(value, (str, bytes, type(None))):
        return []
    try:
        array = np.asarray(value)
        # NumPy does not know bfloat16: its kind is "V", that of raw bytes.
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            return []
        flat = array.astype("c16" if array.dtype.kind == "c" else "f8").ravel()
    except (TypeError, ValueError):  # an object that is no array, or a ragged one
        return []
    # Weights that differ from place to place: a sum alone hides swapped numbers.
    order = np.cos(np.arange(flat.size))
    sums = [np.abs(flat).sum(), flat.real.sum() + flat.imag.sum()]
    return [float(v) for v in (*sums, np.linalg.norm(flat), (flat * order).real.sum())]


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file."""
    with pathlib.Path(path).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def gap(one: list[float], other: list[float]) -> float:
    """Returns the largest difference of two summaries, relative to the numbers' scale."""
    a, b = np.asarray(one), np.asarray(other)
    differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not differ.any():
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b)[1:].max() / max(a[0], b[0]))  # the first of each is its scale
