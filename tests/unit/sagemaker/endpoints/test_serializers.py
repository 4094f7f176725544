"""Bodies of requests and answers: the bytes of the SDK's version 2.257.7, compared by hand once."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, NanoError
from nanotf.estimator import deserializers, serializers

ARRAY = np.array([[1.5, 2.0], [3.0, 4.25]], np.float32)
# 0x76 bytes of header, padded, end with a line feed.
HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"
NPY = b"\x93NUMPY\x01\x00v\x00" + HEADER.ljust(0x75) + b"\n" + ARRAY.tobytes()

BODIES = [
    ("JSONSerializer", {"instances": ARRAY}, '{"instances": [[1.5, 2.0], [3.0, 4.25]]}'),
    ("JSONSerializer", {"inputs": {"a": [ARRAY[0]]}}, '{"inputs": {"a": [[1.5, 2.0]]}}'),
    ("JSONSerializer", ARRAY, "[[1.5, 2.0], [3.0, 4.25]]"),
    ("JSONSerializer", np.int64(3), "3"),
    ("JSONSerializer", "text", '"text"'),
    ("JSONSerializer", io.StringIO("[1]"), "[1]"),
    ("JSONLinesSerializer", [{"a": 1}, [2]], '{"a": 1}\n[2]'),
    ("JSONLinesSerializer", "1\n2", "1\n2"),
    ("CSVSerializer", ARRAY, "1.5,2.0\n3.0,4.25"),
    ("CSVSerializer", [1, "a,b", None], '1,"a,b",'),
    ("CSVSerializer", [["a", 1], "b,2"], "a,1\nb,2"),
    ("CSVSerializer", "a,1\nb,2", "a,1\nb,2"),
    ("CSVSerializer", io.BytesIO(b"a,1"), b"a,1"),
    ("NumpySerializer", ARRAY, NPY),
    ("NumpySerializer", io.BytesIO(NPY), NPY),
    ("IdentitySerializer", b"\x00", b"\x00"),
    ("StringSerializer", "é", b"\xc3\xa9"),
    ("LibSVMSerializer", "1 2:3", "1 2:3"),
    ("DataSerializer", {"data": b"x"}, b"x"),
]
CONTENT_TYPES = {
    "CSVSerializer": "text/csv",
    "DataSerializer": "file-path/raw-bytes",
    "IdentitySerializer": "application/octet-stream",
    "JSONLinesSerializer": "application/jsonlines",
    "JSONSerializer": "application/json",
    "LibSVMSerializer": "text/libsvm",
    "NumpySerializer": "application/x-npy",
    "SparseMatrixSerializer": "application/x-npz",
    "StringSerializer": "text/plain",
}
ACCEPTS = {
    "BytesDeserializer": ("*/*",),
    "CSVDeserializer": ("text/csv",),
    "JSONDeserializer": ("application/json",),
    "JSONLinesDeserializer": ("application/jsonlines",),
    "NumpyDeserializer": ("application/x-npy",),
    "PandasDeserializer": ("text/csv", "application/json"),
    "StreamDeserializer": ("*/*",),
    "StringDeserializer": ("application/json",),
}


@pytest.mark.parametrize(("name", "data", "body"), BODIES)
def test_bodies(name: str, data: Any, body: Any) -> None:
    found = getattr(serializers, name)().serialize(data)
    assert (type(found), found) == (type(body), body)


def test_mime_types() -> None:
    made = {name: getattr(serializers, name)() for name in CONTENT_TYPES}
    assert {name: each.CONTENT_TYPE for name, each in made.items()} == CONTENT_TYPES
    readers = {name: getattr(deserializers, name)() for name in ACCEPTS}
    assert {name: each.ACCEPT for name, each in readers.items()} == ACCEPTS
    assert serializers.JSONSerializer("application/x").CONTENT_TYPE == "application/x"
    assert deserializers.BytesDeserializer(("a/b", "c/d")).ACCEPT == ("a/b", "c/d")


@pytest.mark.parametrize(
    ("name", "data", "kind", "text"),
    [
        ("JSONSerializer", {"a": object()}, InvalidArgumentTypeError, "Received: object"),
        ("CSVSerializer", [], InvalidArgumentError, "must have values"),
        ("CSVSerializer", [[1], []], InvalidArgumentError, "must have values"),
        ("CSVSerializer", {"a": 1}, InvalidArgumentTypeError, "takes rows.*Received: dict"),
        ("CSVSerializer", 3, InvalidArgumentTypeError, "Received: int"),
        ("NumpySerializer", np.zeros((0, 3)), InvalidArgumentError, r"shape \(0, 3\)"),
        ("NumpySerializer", [1, None], InvalidArgumentError, "read no pickles. Received: dtype=ob"),
        ("JSONLinesSerializer", 3, InvalidArgumentTypeError, "an iterable.*Received: int"),
        ("StringSerializer", b"x", InvalidArgumentTypeError, "takes a text. Received: bytes"),
        ("LibSVMSerializer", 3, InvalidArgumentTypeError, "a text or a file. Received: int"),
        ("DataSerializer", "/no/such", InvalidArgumentError, "must be readable.*no/such"),
    ],
)
def test_data_that_cannot_be_sent(name: str, data: Any, kind: type, text: str) -> None:
    with pytest.raises(NanoError, match=text) as caught:
        getattr(serializers, name)().serialize(data)
    assert caught.type is kind


def test_a_file_is_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    assert serializers.DataSerializer().serialize(str(tmp_path / "a")) == b"\xff"


def test_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y,z"]})
    assert serializers.CSVSerializer().serialize(frame) == '1,x\n2,"y,z"\n'
    read = deserializers.PandasDeserializer().deserialize
    assert read(io.BytesIO(b"a,b\n1,2\n"), "text/csv").to_dict("list") == {"a": [1], "b": [2]}
    assert read(io.BytesIO(b'{"a": {"0": 1}}'), "application/json").to_dict("list") == {"a": [1]}
    with pytest.raises(InvalidArgumentError, match="reads text/csv and application/json"):
        read(io.BytesIO(b""), "application/x-npy")


def _read(name: str, body: bytes, kind: str = "", **given: Any) -> Any:
    stream = io.BytesIO(body)
    found = getattr(deserializers, name)(**given).deserialize(stream, kind)
    assert stream.closed
    return found


def test_answers() -> None:
    assert _read("JSONDeserializer", b'{"a": [1, NaN]}')["a"][0] == 1
    assert _read("JSONLinesDeserializer", b'{"a": 1}\n[2]\n') == [{"a": 1}, [2]]
    assert _read("CSVDeserializer", b'a,"b,c"\r\n1,2\r\n') == [["a", "b,c"], ["1", "2"]]
    assert _read("StringDeserializer", "é".encode()) == "é"
    assert _read("BytesDeserializer", b"\x00") == b"\x00"
    stream = io.BytesIO(b"x")
    assert deserializers.StreamDeserializer().deserialize(stream, "a/b") == (stream, "a/b")
    with pytest.raises(json.JSONDecodeError):
        _read("JSONDeserializer", b"{")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (NPY, "application/x-npy"),
        (b"[[1.5, 2.0], [3.0, 4.25]]", "application/json; charset=utf-8"),
        (b"1.5,2\n3,4.25\n", "text/csv"),
    ],
)
def test_answers_as_arrays(body: bytes, kind: str) -> None:
    found = _read("NumpyDeserializer", body, kind, dtype="float32")
    np.testing.assert_array_equal(found, ARRAY)
    assert found.dtype == np.float32


def test_answers_that_are_no_arrays() -> None:
    with pytest.raises(InvalidArgumentError, match="an answer of type 'text/html'"):
        _read("NumpyDeserializer", b"<html>", "text/html")
    pickled = io.BytesIO()
    np.save(pickled, np.array([print], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        _read("NumpyDeserializer", pickled.getvalue(), "application/x-npy")
