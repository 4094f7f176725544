"""Serializers: the bodies of requests, with the names and bytes of SageMaker's SDK.

Source: `sagemaker.serializers` of version 2 of the SageMaker Python SDK.
"""

from __future__ import annotations

import abc
import csv
import importlib
import io
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError


class BaseSerializer(abc.ABC):
    """Makes a request's body. Derive from it for a format of your own."""

    @property
    @abc.abstractmethod
    def CONTENT_TYPE(self) -> str:
        """The MIME type of the body."""

    @abc.abstractmethod
    def serialize(self, data: Any) -> Any:
        """Returns the body: str, bytes, or an object with `read`.

        Args:
            data: what the caller passes to `predict`.
        """


class SimpleBaseSerializer(BaseSerializer):
    """A serializer whose MIME type is an argument.

    Args:
        content_type: str, the MIME type.

    Raises:
        InvalidArgumentTypeError: It is no text.
    """

    def __init__(self, content_type: str = "application/json") -> None:
        if not isinstance(content_type, str):
            raise InvalidArgumentTypeError(
                f"`content_type` must be a MIME type such as 'text/csv'. Received: {content_type!r}"
            )
        self.content_type = content_type

    @property
    def CONTENT_TYPE(self) -> str:
        """The MIME type of the body."""
        return self.content_type

    def _unusable(self, data: Any, wanted: str) -> InvalidArgumentTypeError:
        return InvalidArgumentTypeError(
            f"{type(self).__name__} takes {wanted}. Received: {type(data).__name__}. Convert it, "
            "or choose another serializer."
        )


class JSONSerializer(SimpleBaseSerializer):
    """Makes JSON: of a dict, list, array, tensor, or anything that `json` knows.

    Args:
        content_type: str, default "application/json".
    """

    def serialize(self, data: Any) -> Any:
        """Returns JSON as a str; a file or buffer is read."""
        if hasattr(data, "read"):
            return data.read()
        return json.dumps(data, default=_plain)


def _plain(value: Any) -> Any:
    """Returns lists and numbers for an array or a tensor, at any depth."""
    if not hasattr(value, "__array__"):
        raise InvalidArgumentTypeError(
            f"JSON holds dicts, lists, texts, numbers and arrays. Received: "
            f"{type(value).__name__}. Convert it to one of these."
        )
    return np.asarray(value).tolist()


class JSONLinesSerializer(SimpleBaseSerializer):
    """Makes one line of JSON for each element.

    Args:
        content_type: str, default "application/jsonlines".
    """

    def __init__(self, content_type: str = "application/jsonlines") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns the lines as a str; a str is kept, a file or buffer is read."""
        if isinstance(data, str):
            return data
        if hasattr(data, "read"):
            return data.read()
        if not isinstance(data, Iterable):
            raise self._unusable(data, "an iterable, a text or a file")
        return "\n".join(json.dumps(element, default=_plain) for element in data)


class CSVSerializer(SimpleBaseSerializer):
    """Makes CSV without a header: of a list, a list of lists, an array, a DataFrame.

    Args:
        content_type: str, default "text/csv".
    """

    def __init__(self, content_type: str = "text/csv") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns CSV as a str; a str is kept, a file or buffer is read.

        Raises:
            InvalidArgumentError: A row is empty.
            InvalidArgumentTypeError: There are no rows in it.
        """
        if hasattr(data, "read"):
            return data.read()
        if _is_data_frame(data):
            return data.to_csv(header=False, index=False)
        if isinstance(data, str):
            return data
        if isinstance(data, Mapping) or not hasattr(data, "__len__"):
            raise self._unusable(data, "rows, a text or a file")
        # As the SDK: a tuple is one row, whatever it holds.
        if len(data) and _is_sequence(data[0]) and not isinstance(data, tuple):
            return "\n".join(self._row(row) for row in data)
        return self._row(data)

    def _row(self, row: Any) -> str:
        if isinstance(row, str):
            return row
        if isinstance(row, np.ndarray):
            row = row.flatten()  # a line has no axes: the values come in C's order
        if not hasattr(row, "__len__"):
            raise self._unusable(row, "rows that are lists or arrays")
        if len(row) == 0:
            raise InvalidArgumentError(
                f"A row of CSV must have values. Received: {row!r}. Leave it out."
            )
        buffer = io.StringIO()
        csv.writer(buffer).writerow(row)
        return buffer.getvalue().rstrip("\r\n")


def _is_sequence(value: Any) -> bool:
    # A text is one, too: a list of texts is a list of rows that are ready.
    return hasattr(value, "__iter__") and hasattr(value, "__getitem__")


def _is_data_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")  # whoever has a DataFrame has imported it
    return pandas is not None and isinstance(value, pandas.DataFrame)


class NumpySerializer(SimpleBaseSerializer):
    """Makes the .npy format: of an array, a list, or what NumPy makes an array of.

    Args:
        dtype: of lists; None lets NumPy choose. An array keeps its own.
        content_type: str, default "application/x-npy".
    """

    def __init__(self, dtype: Any = None, content_type: str = "application/x-npy") -> None:
        super().__init__(content_type)
        self.dtype = dtype

    def serialize(self, data: Any) -> Any:
        """Returns bytes; a file or buffer is read, and should hold .npy.

        Raises:
            InvalidArgumentError: The array is empty, or could only be sent as a pickle.
        """
        if isinstance(data, np.ndarray):
            array = data
        elif isinstance(data, list):
            array = np.array(data, self.dtype)
        elif hasattr(data, "read"):
            return data.read()
        else:
            array = np.array(data)
        if array.size == 0:
            raise InvalidArgumentError(
                f"An array must have values. Received: an array of shape {array.shape}."
            )
        if array.dtype.hasobject:
            raise InvalidArgumentError(
                "An array must hold numbers, booleans or texts of fixed length: servers read no "
                f"pickles. Received: dtype={array.dtype}. Choose another dtype, or send JSON."
            )
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()


class SparseMatrixSerializer(SimpleBaseSerializer):
    """Makes the .npz format of a sparse matrix of SciPy.

    Args:
        content_type: str, default "application/x-npz".
    """

    def __init__(self, content_type: str = "application/x-npz") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> bytes:
        """Returns bytes. Raises `ImportError` without SciPy."""
        buffer = io.BytesIO()
        importlib.import_module("scipy.sparse").save_npz(buffer, data)
        return buffer.getvalue()


class LibSVMSerializer(SimpleBaseSerializer):
    """Passes on text in LibSVM's format.

    Args:
        content_type: str, default "text/libsvm".
    """

    def __init__(self, content_type: str = "text/libsvm") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns a str as it is; a file or buffer is read."""
        if isinstance(data, str):
            return data
        if hasattr(data, "read"):
            return data.read()
        raise self._unusable(data, "a text or a file")


class IdentitySerializer(SimpleBaseSerializer):
    """Sends what it gets: str, bytes, a file.

    Args:
        content_type: str, default "application/octet-stream".
    """

    def __init__(self, content_type: str = "application/octet-stream") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> Any:
        """Returns the data."""
        return data


class StringSerializer(SimpleBaseSerializer):
    """Encodes a text as UTF-8.

    Args:
        content_type: str, default "text/plain".
    """

    def __init__(self, content_type: str = "text/plain") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> bytes:
        """Returns bytes."""
        if not isinstance(data, str):
            raise self._unusable(data, "a text")
        return data.encode()


class DataSerializer(SimpleBaseSerializer):
    """Sends bytes, or the content of the file that a text names.

    Args:
        content_type: str, default "file-path/raw-bytes".
    """

    def __init__(self, content_type: str = "file-path/raw-bytes") -> None:
        super().__init__(content_type)

    def serialize(self, data: Any) -> bytes:
        """Returns bytes.

        Raises:
            InvalidArgumentError: The file cannot be read.
        """
        if isinstance(data, bytes):
            return data
        if isinstance(data, Mapping) and "data" in data:
            return self.serialize(data["data"])
        if not isinstance(data, str):
            raise self._unusable(data, "bytes or the path of a file")
        try:
            return pathlib.Path(data).read_bytes()
        except OSError as error:
            raise InvalidArgumentError(f"The file must be readable. Received: {error}.") from error
