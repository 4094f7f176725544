"""Deserializers: what the answers of an endpoint become, with the names of SageMaker's SDK.

Source: `sagemaker.deserializers` of version 2 of the SageMaker Python SDK.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import importlib
import io
import json
from typing import Any

import numpy as np

from nanotf.errors import InvalidArgumentError


class BaseDeserializer(abc.ABC):
    """Reads an answer. Derive from it for a format of your own."""

    @property
    @abc.abstractmethod
    def ACCEPT(self) -> tuple[str, ...]:
        """The MIME types that it can read, which the request names."""

    @abc.abstractmethod
    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns what the answer holds.

        Args:
            stream: the answer's body, an object with `read` and `close`.
            content_type: str, its MIME type.
        """


class SimpleBaseDeserializer(BaseDeserializer):
    """A deserializer whose MIME types are an argument.

    Args:
        accept: str or tuple of str, default "*/*", which asks for no type.
    """

    def __init__(self, accept: str | tuple[str, ...] = "*/*") -> None:
        self.accept = accept

    @property
    def ACCEPT(self) -> tuple[str, ...]:
        """The MIME types that it can read."""
        return (self.accept,) if isinstance(self.accept, str) else self.accept

    def _unreadable(self, content_type: str, wanted: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{type(self).__name__} reads {wanted}. Received: an answer of type "
            f"{content_type!r}. Choose the deserializer of this type, or ask for another by "
            "`accept`."
        )


def _bytes_of(stream: Any) -> bytes:
    with contextlib.closing(stream):
        content: bytes = stream.read()
        return content


def _kind(content_type: str) -> str:
    """Returns a MIME type without its parameters, such as `charset`."""
    return content_type.partition(";")[0].strip().lower()


class BytesDeserializer(SimpleBaseDeserializer):
    """Returns bytes.

    Args:
        accept: str or tuple of str, default "*/*".
    """

    def deserialize(self, stream: Any, content_type: str) -> bytes:
        """Returns the body."""
        return _bytes_of(stream)


class StreamDeserializer(SimpleBaseDeserializer):
    """Returns the body as a stream, and its MIME type. The caller closes the stream.

    Args:
        accept: str or tuple of str, default "*/*".
    """

    def deserialize(self, stream: Any, content_type: str) -> tuple[Any, str]:
        """Returns the stream and the MIME type."""
        return stream, content_type


class StringDeserializer(SimpleBaseDeserializer):
    """Returns text.

    Args:
        encoding: str, default "UTF-8".
        accept: str or tuple of str, default "application/json".
    """

    def __init__(
        self, encoding: str = "UTF-8", accept: str | tuple[str, ...] = "application/json"
    ) -> None:
        super().__init__(accept)
        self.encoding = encoding

    def deserialize(self, stream: Any, content_type: str) -> str:
        """Returns the body as a str."""
        return _bytes_of(stream).decode(self.encoding)


class JSONDeserializer(SimpleBaseDeserializer):
    """Returns what JSON holds.

    Args:
        accept: str or tuple of str, default "application/json".
    """

    def __init__(self, accept: str | tuple[str, ...] = "application/json") -> None:
        super().__init__(accept)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns dicts, lists, texts and numbers. Raises `ValueError` for other text."""
        return json.loads(_bytes_of(stream).decode())


class JSONLinesDeserializer(SimpleBaseDeserializer):
    """Returns a list of what each line of JSON holds.

    Args:
        accept: str or tuple of str, default "application/jsonlines".
    """

    def __init__(self, accept: str | tuple[str, ...] = "application/jsonlines") -> None:
        super().__init__(accept)

    def deserialize(self, stream: Any, content_type: str) -> list[Any]:
        """Returns a list. Raises `ValueError` for other text."""
        # Not `splitlines`: JSON may hold U+2028, which that takes for a line end.
        lines = _bytes_of(stream).decode().rstrip().split("\n")
        return [json.loads(line) for line in lines]


class CSVDeserializer(SimpleBaseDeserializer):
    """Returns a list of lists of str.

    Args:
        encoding: str, default "utf-8".
        accept: str or tuple of str, default "text/csv".
    """

    def __init__(self, encoding: str = "utf-8", accept: str | tuple[str, ...] = "text/csv") -> None:
        super().__init__(accept)
        self.encoding = encoding

    def deserialize(self, stream: Any, content_type: str) -> list[list[str]]:
        """Returns the rows."""
        # As the SDK: a line end in a cell with quotes is lost.
        return list(csv.reader(_bytes_of(stream).decode(self.encoding).splitlines()))


class NumpyDeserializer(SimpleBaseDeserializer):
    """Returns an array; of .npz what `numpy.load` returns.

    Args:
        dtype: of an array made from CSV or JSON; None lets NumPy choose.
        accept: str or tuple of str, default "application/x-npy".
        allow_pickle: bool, default False. True runs whatever code a pickle in the answer names.
    """

    def __init__(
        self,
        dtype: Any = None,
        accept: str | tuple[str, ...] = "application/x-npy",
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(accept)
        self.dtype, self.allow_pickle = dtype, allow_pickle

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns an array.

        Raises:
            InvalidArgumentError: The answer is of another type.
            ValueError: The answer is damaged, or a pickle and `allow_pickle` is False.
        """
        content, kind = _bytes_of(stream), _kind(content_type)
        if kind in ("application/x-npy", "application/x-npz"):  # `np.load` tells them apart
            return np.load(io.BytesIO(content), allow_pickle=self.allow_pickle)
        if kind == "application/json":
            return np.array(json.loads(content.decode()), dtype=self.dtype)
        if kind == "text/csv":
            text = io.StringIO(content.decode())  # `genfromtxt` takes a str for the name of a file
            return np.genfromtxt(text, delimiter=",", dtype=self.dtype)
        raise self._unreadable(content_type, "application/x-npy, x-npz, json, and text/csv")


class PandasDeserializer(SimpleBaseDeserializer):
    """Returns a DataFrame of CSV, or of JSON in the orientation "columns".

    Args:
        accept: str or tuple of str, default ("text/csv", "application/json").
    """

    def __init__(self, accept: str | tuple[str, ...] = ("text/csv", "application/json")) -> None:
        super().__init__(accept)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Returns a DataFrame. Raises `ImportError` without pandas.

        Raises:
            InvalidArgumentError: The answer is of another type.
        """
        pandas = importlib.import_module("pandas")  # no dependency of nanotf
        readers = {"text/csv": pandas.read_csv, "application/json": pandas.read_json}
        read = readers.get(_kind(content_type))
        if read is None:
            raise self._unreadable(content_type, "text/csv and application/json")
        return read(io.BytesIO(_bytes_of(stream)))
