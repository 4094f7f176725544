"""Tensors as nested lists of JSON, by TensorFlow Serving's rules.

Source of the rules and of the texts of errors: `util/json_tensor.cc` of tensorflow/serving. Lists
of equal lengths whose values all have a fitting type become an array at once, which is fast; others
are read value by value, which knows the error, too.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nanotf.inference.signature import STRING
from nanotf.serving.interface import Refusal
from nanotf.serving.json_text import shown

Array = np.ndarray[Any, Any]

# The header of an answer with a token for a value that is not finite: strict readers refuse it.
NONFINITE = ("X-Nanotf-Nonfinite", "1")

_AXES = 31  # of a value: NumPy 1 has 32, one of them for the rows
_NULL = b"null"  # what orjson writes for a float that is not finite
_BYTES = "b64"  # the only key of an object that holds bytes
# By NumPy's kind of the type that is wanted, the types of values that fit. (True is no number.)
_FITTING: dict[str, set[type]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}}
# TensorFlow's names of types, where NumPy has others.
_NAMES = {"float16": "half", "float32": "float", "float64": "double"}


def type_name(dtype: str) -> str:
    """Returns TensorFlow's name of a type of `TensorSpec`."""
    return _NAMES.get(dtype, dtype)


# ------------------------------------------------------------------------------------------ reading
def tensor(value: Any, dtype: str) -> Array:
    """Makes an array of a value: a plain one, or lists of equal lengths.

    Args:
        value: as JSON holds it. Floats are any numbers; integers are whole numbers that are written
            so (not 1.0); texts are strings or `{"b64": "..."}`.
        dtype: of `TensorSpec`. Texts become arrays of bytes objects.

    Raises:
        Refusal: The value does not fit. Status 400, or 501 for a type that JSON cannot express.
    """
    found = _at_once(value, dtype)
    if found is not None:
        return found
    shape = _shape(value)
    leaves: list[Any] = []
    _fill(leaves, value, shape, 0, _reader(dtype, value))
    return _array(leaves, shape, dtype)


def rows(values: list[Any], dtype: str, where: str = "") -> Array:
    """Makes an array of the rows of a request.

    Args:
        values: one for each row; all of one shape.
        dtype: see `tensor`.
        where: what a text of an error says after the number of the row, such as " key: x".

    Raises:
        Refusal: See `tensor`.
    """
    found = _at_once(values, dtype)
    if found is not None:
        return found
    read = _reader(dtype, values)
    leaves: list[Any] = []
    first: tuple[int, ...] = ()
    for index, value in enumerate(values):
        before = len(leaves)
        try:
            shape = _shape(value)
            _fill(leaves, value, shape, 0, read)
            first = first if index else shape
            _check_alike(first, shape, len(leaves) - before)
        except Refusal as refusal:
            raise Refusal(
                refusal.status,
                f"Failed to process element: {index}{where} of 'instances' list. Error: "
                f"INVALID_ARGUMENT: {refusal.text}",
            ) from None
    return _array(leaves, (len(values), *first), dtype)


def is_bytes_object(value: Any) -> bool:
    """Returns True for `{"b64": "..."}`."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get(_BYTES), str)


def bytes_of(value: Any) -> bytes:
    """Returns the bytes of `{"b64": "..."}`.

    Raises:
        Refusal: It is another object, or no base64. Status 400.
    """
    if not is_bytes_object(value):
        raise Refusal(400, f"JSON Value: {shown(value)} not formatted correctly for base64 data")
    # As absl::Base64Unescape: white space does not count, and padding may be missing.
    text = "".join(value[_BYTES].split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):  # the second if it is not ASCII
        raise Refusal(400, "Unable to base64 decode") from None


def kind_of(value: Any) -> str:
    """Returns TensorFlow Serving's word for what a value is in JSON."""
    if value is None or isinstance(value, bool):
        return {None: "Null", True: "True", False: "False"}[value]
    words = {dict: "Object", list: "Array", str: "String", int: "Number", float: "Number"}
    return words[type(value)]


def _at_once(value: Any, dtype: str) -> Array | None:
    """Returns None if the values must be read one by one."""
    if dtype == STRING or dtype not in _READERS:
        return None
    wanted = np.dtype(dtype)
    leaves, shape = _leaves(value)
    if leaves is None or not set(map(type, leaves)) <= _FITTING[wanted.kind]:
        return None
    found = np.array(leaves)
    if wanted.kind in "iu":
        if found.dtype.kind not in "iu":  # some fit no type of NumPy together
            return None
        limits = np.iinfo(wanted)  # NumPy 1 compares uint64 with them as floats
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            return None
    with np.errstate(over="ignore"):  # TensorFlow Serving makes infinities of them, too
        return found.astype(wanted, copy=False).reshape(shape)


def _leaves(value: Any) -> tuple[list[Any] | None, tuple[int, ...]]:
    """Returns the plain values in lists, and their shape; None for lists of unequal lengths.

    Level by level: NumPy takes three times as long to find the shape of lists that are short.
    """
    level, shape = [value], []
    while type(level[0]) is list:
        if set(map(type, level)) != {list}:
            return None, ()
        lengths = set(map(len, level))
        shape.append(lengths.pop())
        if lengths or not shape[-1] or len(shape) > _AXES + 1:
            return None, ()
        level = list(itertools.chain.from_iterable(level))
    return level, tuple(shape)


def _shape(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if len(shape) > _AXES:
            raise Refusal(
                400, f"A tensor must have at most {_AXES} axes. Received: a list nested more deeply"
            )
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _fill(
    leaves: list[Any], value: Any, shape: tuple[int, ...], level: int, read: Callable[[Any], Any]
) -> None:
    """Appends the values in lists, which must have the lengths of `shape`."""
    if not isinstance(value, list):
        if level != len(shape):
            raise Refusal(
                400,
                f"JSON Value: {shown(value)} found at incorrect level: {level + 1} in the JSON "
                f"DOM. Expected at level: {len(shape)}",
            )
        leaves.append(read(value))
        return
    if level >= len(shape):
        raise Refusal(400, f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise Refusal(
            400,
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: "
            f"{shape[level]}",
        )
    for each in value:
        _fill(leaves, each, shape, level + 1, read)


def _check_alike(first: tuple[int, ...], shape: tuple[int, ...], size: int) -> None:
    if size != math.prod(first):
        raise Refusal(400, f"Expecting tensor size: {math.prod(first)} but got: {size}")
    if shape != first:
        wanted, received = (str(list(each)).replace(" ", "") for each in (first, shape))
        raise Refusal(400, f"Expecting shape {wanted} but got: {received}")


def _array(leaves: list[Any], shape: tuple[int, ...], dtype: str) -> Array:
    if dtype == STRING:
        array: Array = np.empty(len(leaves), object)  # NumPy's own bytes lose zeros at their ends
        array[:] = leaves
    else:
        with np.errstate(over="ignore"):
            array = np.array(leaves, dtype)
    return array.reshape(shape)


# ---------------------------------------------------------------------------------- single values
def _reader(dtype: str, value: Any) -> Callable[[Any], Any]:
    """Returns what checks one value, and returns it as NumPy takes it."""
    if dtype not in _READERS:
        raise Refusal(501, f"Conversion of JSON Value: {shown(value)} to type: {type_name(dtype)}")
    return _READERS[dtype]


def _wrong_type(value: Any, dtype: str) -> Refusal:
    return Refusal(
        400,
        f"JSON Value: {shown(value)} Type: {kind_of(value)} is not of expected type: "
        f"{type_name(dtype)}",
    )


def _float_reader(dtype: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in (int, float):
            raise _wrong_type(value, dtype)
        return value

    return read


def _integer_reader(dtype: str) -> Callable[[Any], Any]:
    limits = np.iinfo(dtype)

    def read(value: Any) -> Any:
        if type(value) is not int or not limits.min <= value <= limits.max:
            raise _wrong_type(value, dtype)
        return value

    return read


def _read_boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _wrong_type(value, "bool")
    return value


def _read_text(value: Any) -> bytes:
    if isinstance(value, dict):
        return bytes_of(value)
    if not isinstance(value, str):
        raise _wrong_type(value, STRING)
    return value.encode()


_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: _float_reader(name) for name in ("float16", "float32", "float64")},
    **{name: _integer_reader(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: _integer_reader(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "bool": _read_boolean,
    STRING: _read_text,
}


# ------------------------------------------------------------------------------------------ writing
def tensor_text(array: Array, as_bytes: bool = False) -> tuple[bytes, bool]:
    """Writes an array as nested lists of JSON.

    Floats have the fewest digits that tell them from others of their type, and a point or an
    exponent.

    Args:
        array: of numbers, booleans, or (as objects or NumPy's strings) texts.
        as_bytes: True to write texts as `{"b64": "..."}`.

    Returns:
        The text; and False if it has a token for a value that is not finite.

    Raises:
        Refusal: JSON cannot express the type, or a text is not UTF-8. Status 400.
    """
    import orjson

    if array.dtype.kind in "OSU":
        texts: Array = np.empty(array.size, object)
        texts[:] = [_written(value, as_bytes) for value in array.ravel().tolist()]
        return orjson.dumps(texts.reshape(array.shape).tolist()), True
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise Refusal(
            400, f"Failed to write JSON value for tensor type: {type_name(str(array.dtype))}"
        )
    # orjson knows arrays of the machine's byte order, in C's order, of at least one axis.
    array = np.asarray(array, array.dtype.newbyteorder("="))
    array = array if array.flags.c_contiguous else array.copy()
    text = orjson.dumps(array if array.ndim else array[()], option=orjson.OPT_SERIALIZE_NUMPY)
    if _NULL not in text:
        return text, True
    return _with_tokens(text, array), False


def _written(value: Any, as_bytes: bool) -> Any:
    content = value.encode() if isinstance(value, str) else value
    if not isinstance(content, bytes):
        raise Refusal(400, f"Failed to write JSON value for tensor type: {type(content).__name__}")
    if as_bytes:
        return {_BYTES: base64.b64encode(content).decode()}
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Refusal(
            400,
            "Failed to write JSON value for tensor type: string. Received: bytes that are not "
            "UTF-8. Let the name of such an output end in _bytes.",
        ) from None


def _with_tokens(text: bytes, array: Array) -> bytes:
    """Puts a token in place of each null that orjson has written, in order."""
    odd = array[~np.isfinite(array)].tolist()
    parts = text.split(_NULL)  # numbers and booleans have no other null
    pieces = [parts[0]]
    for value, part in zip(odd, parts[1:], strict=True):
        token = b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity"
        pieces += (token, part)
    return b"".join(pieces)
