"""Reads and writes arrays in NumPy's formats, npy and npz, as bodies of requests and answers.

The formats: `numpy.lib.format`, and save_npz of scipy.sparse for sparse matrices. A pickle is never
read. No memory is taken before the sizes that a header claims have been compared with the body.
"""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy

from nanotf.serving.interface import Refusal

Array = np.ndarray[Any, Any]

_SUFFIX = ".npy"  # of a member of an npz
# Version 3 differs only in the names of fields, and no input of a model has fields.
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
# What `numpy.lib.format` raises for a header that is none: it parses Python's literals.
_NO_HEADER = (
    ValueError,
    TypeError,
    SyntaxError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)
_NO_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a method of compression, or a part of an archive in several files
    RuntimeError,  # encrypted
    ValueError,
    OSError,
    OverflowError,
)
_NUMBERS = "biufc"  # kinds of NumPy's types
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that NumPy writes


def read_npy(body: bytes) -> Array:
    """Reads an array.

    Returns:
        A view of the body, which cannot be written to.

    Raises:
        Refusal: 400, the body is no such file, holds Python objects, or has not the size that its
            header claims.
    """
    stream = io.BytesIO(body)
    try:
        reader = _READERS[npy.read_magic(stream)]
        shape, by_columns, dtype = reader(stream)
    except _NO_HEADER as error:
        raise Refusal(400, f"The body must be an npy file of version 1 or 2: {error}") from None
    if dtype.hasobject:
        raise Refusal(
            400,
            "An npy file must hold numbers or text. Received: Python objects, which are pickles "
            "and are not read. Convert the array to a type of numbers.",
        )
    if not dtype.itemsize:  # the body's length would not bound the number of such items
        raise Refusal(400, f"The items of an npy file must have a size. Received: {dtype}.")
    offset = stream.tell()
    wanted = math.prod(shape) * dtype.itemsize
    if any(length < 0 for length in shape) or wanted != len(body) - offset:
        raise Refusal(
            400,
            f"The header of an npy file must fit what follows. Received: an array {shape} of "
            f"{dtype}, which takes {wanted} bytes, and {len(body) - offset} bytes.",
        )
    return _shaped(body, offset, dtype, shape, by_columns)


def _shaped(
    body: bytes, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], by_columns: bool
) -> Array:
    try:
        if not math.prod(shape):  # `frombuffer` takes no empty buffer
            return np.zeros(shape, dtype)
        flat: Array = np.frombuffer(body, dtype, offset=offset)
        return flat.reshape(shape, order="F" if by_columns else "C")
    # More axes than NumPy has, an empty axis among huge ones, or True as a length.
    except (ValueError, TypeError) as error:
        raise Refusal(400, f"The shape of an npy file cannot be used: {error}") from None


def write_npy(array: Array) -> bytes:
    """Returns the npy file of an array. One of text gets NumPy's type for text of fixed width."""
    stream = io.BytesIO()
    npy.write_array(stream, _without_objects(array), allow_pickle=False)
    return stream.getvalue()


def read_npz(body: bytes, most: int) -> dict[str, Array]:
    """Reads named arrays.

    Args:
        most: bytes, the size to which the body may be inflated.

    Raises:
        Refusal: 400, as `read_npy`; 413, the arrays are larger.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > most:
                raise Refusal(
                    413, f"The arrays of an npz file must not be larger than {most} bytes together."
                )
            # `file_size` is the archive's word; a member is never read beyond it.
            files = {member.filename: _member(archive, member) for member in members}
    except _NO_ARCHIVE as error:
        raise Refusal(400, f"The body must be an npz file: {error}") from None
    return {name.removesuffix(_SUFFIX): read_npy(content) for name, content in files.items()}


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.compress_type not in _COMPRESSIONS:
        raise Refusal(400, "The arrays of an npz file must be stored or deflated.")
    with archive.open(member) as stream:
        return stream.read(member.file_size)


def write_npz(arrays: Mapping[str, Array]) -> bytes:
    """Returns the npz file of named arrays."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(name + _SUFFIX, write_npy(array))
    return stream.getvalue()


def is_sparse(arrays: Mapping[str, Array]) -> bool:
    """Returns True for the arrays of a matrix that save_npz of scipy.sparse has written."""
    return {"format", "shape", "data"} <= set(arrays)


def dense(arrays: Mapping[str, Array], most: int) -> Array:
    """Makes an array of a sparse matrix, in one of the formats COO, CSR and CSC.

    Args:
        arrays: as save_npz of scipy.sparse names them.
        most: bytes that the result may take.

    Raises:
        Refusal: 400, the arrays are no such matrix; 413, the result would be larger.
    """
    kind, data = str(_text(arrays["format"])), arrays["data"]
    if data.dtype.kind not in _NUMBERS:
        raise Refusal(400, f"A sparse matrix must hold numbers. Received: {data.dtype}.")
    try:
        rows, columns = (int(length) for length in arrays["shape"])
        if rows * columns * data.itemsize > most:
            raise Refusal(413, f"A sparse matrix must not take more than {most} bytes as an array.")
        found = np.zeros((rows, columns), data.dtype)
        at = _places(kind, arrays, (rows, columns))
        if any(each.shape != data.shape or data.ndim != 1 for each in at):
            raise ValueError("its lengths do not fit.")
        # NumPy would count a negative place from the end.
        if any(len(each) and each.min() < 0 for each in at):
            raise IndexError("a place is negative.")
        np.add.at(found, at, data)  # a place may come twice: its values add up, as in SciPy
    except (KeyError, IndexError, ValueError, TypeError, OverflowError) as error:
        raise Refusal(
            400, f"The npz file holds no sparse matrix that can be used: {error}"
        ) from None
    return found


def _places(kind: str, arrays: Mapping[str, Array], shape: tuple[int, int]) -> tuple[Array, Array]:
    if kind == "coo":
        return arrays["row"], arrays["col"]
    if kind not in ("csr", "csc"):
        raise ValueError(f"its format must be coo, csr or csc. Received: {kind!r}.")
    lines = shape[0] if kind == "csr" else shape[1]
    counts = np.diff(arrays["indptr"])
    indices = arrays["indices"]
    if len(counts) != lines or counts.sum() != len(indices):  # before `repeat` takes memory
        raise ValueError("its lengths do not fit.")
    outer = np.repeat(np.arange(lines), counts)
    return (outer, indices) if kind == "csr" else (indices, outer)


def _text(array: Array) -> Any:
    value = array.item() if array.size == 1 else ""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _without_objects(array: Array) -> Array:
    if not array.dtype.hasobject:
        return array
    # Only outputs of text are arrays of objects. Zero bytes at a text's end are written, but a
    # reader cannot tell them from those that fill up shorter texts.
    values = [each if isinstance(each, bytes) else str(each).encode() for each in array.flat]
    width = max(map(len, values), default=1) or 1
    texts: Array = np.array(values, f"S{width}").reshape(array.shape)
    return texts
