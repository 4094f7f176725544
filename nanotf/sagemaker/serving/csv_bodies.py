"""Reads and writes CSV: a line is a row.

A column holds numbers or text as the model's input does, not as a cell looks. Source of the form:
tensorflowServing.js of aws/sagemaker-tensorflow-serving-container, which has no reader for quotes.
Here the standard library reads them (RFC 4180). There is no header line.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nanotf.inference.signature import STRING, TensorSpec
from nanotf.serving.interface import Refusal

Array = np.ndarray[Any, Any]

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def read_csv(text: str, spec: TensorSpec) -> Array:
    """Reads the rows of an input.

    Args:
        text: each line holds the values of a row, in C's order. Empty lines are skipped.
        spec: the input. The values get its shape. If its rank is unknown, lines with one value
            become values, and others become lists.

    Raises:
        Refusal: 400, the text is no CSV, a value is no number, or a line has too many or too few.
    """
    lines = _lines(text)
    read = _reader(spec.dtype)
    values: list[Any] = []
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise Refusal(
                400,
                f"The lines of a CSV body must have equally many values. Received: {len(line)} in "
                f"row {number}, {len(lines[0])} in row 1.",
            )
        try:
            values += map(read, line)
        except (ValueError, KeyError):
            raise Refusal(
                400,
                f"The values for {spec.name} must be of type {spec.dtype}. Received: {line!r:.200} "
                f"in row {number} of the CSV body.",
            ) from None
    return _shaped(values, len(lines), len(lines[0]), spec)


def _lines(text: str) -> list[list[str]]:
    try:
        # newline="": `csv` finds the line ends, which cells in quotes may hold.
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except csv.Error as error:
        raise Refusal(400, f"The body must be CSV: {error}") from None
    if not lines:
        raise Refusal(400, "The CSV body must have a line for each row. Received: none.")
    return lines


def _reader(dtype: str) -> Callable[[str], Any]:
    if dtype == STRING:
        return str.encode
    kind = _kind(dtype)
    if kind == "b":
        return lambda cell: _BOOLEANS[cell.strip().lower()]
    # As floats, whole numbers above 2**53 would lose digits.
    return lambda cell: _number(cell, int if kind in "iu" else float)


def _kind(dtype: str) -> str:
    try:
        return np.dtype(dtype).kind
    except TypeError:  # bfloat16: `Signature.checked` refuses it
        return "f"


def _number(cell: str, kind: Callable[[str], Any]) -> Any:
    if "_" in cell:  # Python's own notation
        raise ValueError
    return kind(cell)


def _shaped(values: list[Any], rows: int, columns: int, spec: TensorSpec) -> Array:
    array: Array
    if spec.dtype == STRING:
        array = np.empty(len(values), object)  # NumPy's own bytes lose zeros at their ends
        array[:] = values
    else:
        array = np.array(values)  # `Signature.checked` converts it, and knows the range
    if spec.shape is None:
        return array if columns == 1 else array.reshape(rows, columns)
    row = [-1 if length is None else length for length in spec.shape[1:]]
    if row.count(-1) > 1:  # a line does not tell them
        return array.reshape(rows, columns)
    try:
        return array.reshape(rows, *row)
    except ValueError:
        raise Refusal(
            400,
            f"A line of a CSV body must hold the values of a row of {spec.name}, of the shape "
            f"{spec.shape[1:]}. Received: {columns} values in a line.",
        ) from None


def write_csv(array: Array) -> bytes:
    """Returns the lines of an output's rows. Floats have as few digits as tell them apart.

    Raises:
        Refusal: 406, the output has no rows, or bytes that are not UTF-8.
    """
    if not array.ndim:
        raise Refusal(406, "text/csv needs an output with rows. Ask for application/json.")
    rows = array.reshape(len(array), math.prod(array.shape[1:]))  # -1 needs rows
    stream = io.StringIO()
    try:
        lines = _texts(rows)
    except UnicodeDecodeError:
        raise Refusal(406, "text/csv cannot hold bytes. Ask for application/json.") from None
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue().encode()


def _texts(rows: Array) -> list[list[str]]:
    if rows.dtype.kind in "OSU":
        return [
            [each.decode() if isinstance(each, bytes) else str(each) for each in row]
            for row in rows.tolist()
        ]
    return rows.astype(str).tolist()  # type: ignore[no-any-return]
