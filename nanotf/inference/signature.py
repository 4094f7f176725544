"""The signatures of a program: the tensors that it takes and returns, by name.

A server checks requests against them. So nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError

DEFAULT = "serving_default"  # the signature's name in a SavedModel
STRING = "string"  # a `dtype`: text or bytes, in arrays of objects

# The method of a SavedModel's signature, which says by which calls it may be used.
PREDICT = "tensorflow/serving/predict"
CLASSIFY = "tensorflow/serving/classify"
REGRESS = "tensorflow/serving/regress"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor that a program takes or returns."""

    name: str
    dtype: str  # NumPy's name, such as "float32"; or `STRING`, "bfloat16"
    # None for an axis of any length, and in place of the tuple for any rank. The first axis is that
    # of the rows.
    shape: tuple[int | None, ...] | None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Returns True if an array of this shape can be the tensor's value."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            wanted in (None, length) for wanted, length in zip(self.shape, shape, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Signature:
    """One of the functions of a program."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    method: str = PREDICT  # or `CLASSIFY`, `REGRESS`

    # Cached, as are those below: a server asks for each request.
    @functools.cached_property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(spec.name for spec in self.inputs)

    @functools.cached_property
    def has_rows(self) -> bool:
        """True if all inputs and outputs have rows, of any number, along their first axis."""
        shapes = [spec.shape for spec in (*self.inputs, *self.outputs)]
        return all(shape is not None and shape[:1] == (None,) for shape in shapes)

    @functools.cached_property
    def may_have_rows(self) -> bool:
        """True if all inputs and outputs have rows, or may have: those of any rank."""
        shapes = [spec.shape for spec in (*self.inputs, *self.outputs)]
        return all(shape is None or shape[:1] == (None,) for shape in shapes)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the inputs as arrays of the signature's types, in its order.

        Numbers are converted where NumPy calls that safe, or from one kind of number to a float;
        a float that would become an integer is refused.

        Args:
            inputs: by name, arrays or nested lists.

        Raises:
            InvalidArgumentError: A name is missing or unknown, or a shape does not fit.
            InvalidArgumentTypeError: A value has another type.
        """
        if inputs.keys() != self._names:
            raise InvalidArgumentError(
                f"The inputs must be {', '.join(self.input_names)}. Received: "
                f"{', '.join(map(str, inputs)) or 'none'}. Pass each of them by name."
            )
        return {spec.name: _checked(spec, inputs[spec.name]) for spec in self.inputs}

    @functools.cached_property
    def _names(self) -> frozenset[str]:  # a request may have its inputs in any order
        return frozenset(self.input_names)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        """Reads what `to_json` has written."""
        return cls(
            tuple(_spec_of(each) for each in value["inputs"]),
            tuple(_spec_of(each) for each in value["outputs"]),
            str(value["method"]),
        )


def _spec_of(value: Mapping[str, Any]) -> TensorSpec:
    shape = value["shape"]
    return TensorSpec(
        str(value["name"]), str(value["dtype"]), None if shape is None else tuple(shape)
    )


def _checked(spec: TensorSpec, value: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value)
    except ValueError:  # ragged lists
        raise InvalidArgumentError(
            f"{spec.name} must be an array, or lists of equal lengths. Received: lists of unequal "
            "lengths."
        ) from None
    if spec.dtype == STRING:
        if array.dtype.kind not in "OSU":
            raise _wrong_type(spec, array)
        array = array.astype(object)  # `PaddedRows` knows texts by this dtype
    else:
        array = _converted(spec, array)
    if not spec.accepts(array.shape):
        assert spec.shape is not None
        wanted = ", ".join(map(str, spec.shape)) + ("," if len(spec.shape) == 1 else "")
        raise InvalidArgumentError(
            f"{spec.name} must have the shape ({wanted}). Received: {array.shape}. The first axis "
            "is that of the rows."
        )
    return array


def _converted(spec: TensorSpec, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    try:
        wanted = np.dtype(spec.dtype)
    except TypeError:  # bfloat16: NumPy knows it once TensorFlow is imported
        raise _wrong_type(spec, array) from None
    if array.dtype == wanted:
        return array
    # Lists of whole numbers become int64, and those of floats float64, whatever was meant.
    kinds = {"f": "fiub", "i": "iu", "u": "iu", "b": "b", "c": "cfiu"}
    if array.dtype.kind not in kinds.get(wanted.kind, ""):
        raise _wrong_type(spec, array)
    # A float64 beyond float32 becomes infinite, as in TensorFlow: no warning for each request.
    with np.errstate(over="ignore"):
        found = array.astype(wanted)
    if wanted.kind in "iu" and not np.array_equal(found, array):  # `astype` has wrapped a number
        raise InvalidArgumentError(
            f"{spec.name} must hold numbers of the type {spec.dtype}. Received: a number outside "
            "of its range."
        )
    return found


def _wrong_type(spec: TensorSpec, array: np.ndarray[Any, Any]) -> InvalidArgumentTypeError:
    return InvalidArgumentTypeError(
        f"{spec.name} must be of type {spec.dtype}. Received: {array.dtype}. Convert it."
    )
