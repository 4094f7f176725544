"""Python values as JSON and arrays, for checkpoints. Reading them runs no code, unlike a pickle."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.shipping.data.arrays import dtype_name, numpy_dtype

_LONGEST_BITS = 10_000  # 3,010 digits; Python refuses to read more than 4,300

Arrays = dict[str, np.ndarray[Any, Any]]


class Unencodable(TypeError):
    """A value is neither plain data nor an array."""


def encode(value: Any, arrays: Arrays, name: str) -> Any:
    """Returns a value as JSON. Lists, tuples, dicts, numbers, strings and arrays come back equal.

    Args:
        arrays: gets the arrays in the value, by name.
        name: unique in `arrays`; the arrays' names begin with it.

    Raises:
        Unencodable: The value is of another kind, or holds one.
    """
    if type(value) is int and value.bit_length() > _LONGEST_BITS:
        raise Unencodable(f"{name} is a number of more digits than JSON readers accept")
    # Exact classes: an object of a subclass would come back as one of the base class.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":  # JSON has no complex ones
        return {"scalar": value.item(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        arrays[name] = value
        return {"array": name, "dtype": dtype_name(value.dtype)}
    if type(value) in (list, tuple):
        items = [encode(item, arrays, f"{name}/{place}") for place, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, Mapping):
        # Pairs, since JSON's own keys are strings.
        parts = enumerate(value.items())
        pairs = [
            [encode(key, arrays, f"{name}/{n}/key"), encode(item, arrays, f"{name}/{n}")]
            for n, (key, item) in parts
        ]
        return {"dict": pairs}
    raise Unencodable(f"{name} is an object of class {type(value).__name__}")


def decode(encoded: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Returns the value that `encode` got."""
    if isinstance(encoded, list):
        return [decode(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "array" in encoded:
        return typed(arrays[encoded["array"]], encoded["dtype"])
    if "scalar" in encoded:
        return numpy_dtype(encoded["dtype"]).type(encoded["scalar"])
    if "tuple" in encoded:
        return tuple(decode(encoded["tuple"], arrays))
    return {decode(key, arrays): decode(item, arrays) for key, item in encoded["dict"]}


def typed(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Returns an array with its dtype: NumPy's files know no extension types such as bfloat16."""
    found = numpy_dtype(dtype)
    return array if array.dtype == found else array.view(found)


def mark_of(value: Any) -> str | None:
    """Returns a text that differs if the value differs, None if it cannot be encoded."""
    arrays: Arrays = {}
    try:
        text = json.dumps(encode(value, arrays, ""))
    except Unencodable:
        return None
    sums = [
        (name, array.shape, zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        for name, array in arrays.items()
        if array.size
    ]
    return f"{text} {sums}"
