"""Bodies of requests without a user's code: JSON, JSON lines, CSV, npy, npz."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from typing import Any

import numpy as np
import pytest
from hosting_fakes import (
    CSV,
    JSON,
    JSON_LINES,
    NPY,
    NPZ,
    HostServer,
    double,
    echo,
    error,
    invoke,
    two_inputs,
    value,
)

from nanotf.sagemaker.serving.numpy_bodies import write_npy, write_npz

ROWS = np.array([[1, 2], [3, 4]], np.float32)
DOUBLED = {"predictions": [[2.0, 4.0], [6.0, 8.0]]}


# ------------------------------------------------------------------------------------------- JSON
@pytest.mark.parametrize(
    "kind", [JSON, JSON_LINES, "application/jsons", "Application/JSON; charset=utf-8"]
)
@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"instances": [[1, 2], [3, 4]]}', DOUBLED),
        ('{\n "instances":\n [[1, 2],\n [3, 4]]}\n', DOUBLED),
        ('{"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}', DOUBLED),
        ('{"inputs": [[1, 2], [3, 4]]}', {"outputs": DOUBLED["predictions"]}),
        ("[[1, 2], [3, 4]]", DOUBLED),
        ("[[1, 2],\n [3, 4]]", DOUBLED),
        ("[1, 2]", {"predictions": [[2.0, 4.0]]}),
        ('{"x": [1, 2]}', {"predictions": [[2.0, 4.0]]}),
        ("[1, 2]\n[3, 4]", DOUBLED),
        ("[1, 2]\r\n\r\n[3, 4]\r\n", DOUBLED),
        ('{"x": [1, 2]}\n{"x": [3, 4]}', DOUBLED),
    ],
)
def test_json(kind: str, body: str, wanted: Any) -> None:
    assert value(invoke(double(), body, kind)) == wanted


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ('"a ] [ b"', ["a ] [ b"]),
        (r'"\"inputs\": 1"', ['"inputs": 1']),
        ('["} {"]\n["x"]', None),
        ('"a"\n"b ] ["', ["a", "b ] ["]),
        ("{}", None),
    ],
)
def test_values_decide_and_not_the_text(body: str, texts: list[str] | None) -> None:
    """The containers misread texts that look like their keys or like several values."""
    answer = invoke(echo((None,), "string"), body)
    if texts is None:
        assert error(answer)[0] == 400
    else:
        assert value(answer) == {"predictions": texts}


def test_scalars_in_lines() -> None:
    assert value(invoke(double((None,)), "1\n2\n3")) == {"predictions": [2.0, 4.0, 6.0]}
    assert value(invoke(double((None,)), "1")) == {"predictions": [2.0]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "JSON Parse error: The document is empty"),
        ("[1, 2", "JSON Parse error"),
        ("[1, 2]\n[3, 4", "(line 2 of JSON lines)"),
        ("[1,\n2,\n}", "JSON Parse error"),
        ("[" * 100_000, "JSON Parse error"),
        (b"\xff\xfe", "JSON Parse error"),
        ("[[1, 2], [3]]", "Expecting tensor size"),
        ("[1, 2, 3]", "shape"),
        ('["a", "b"]', "not of expected type: float"),
        ('{"instances": []}', "No values in 'instances' array"),
        ('{"instances": [[1, 2]], "inputs": [[1, 2]]}', "only one of"),
        ('{"examples": [{"a": 1}]}', "Missing 'inputs' or 'instances' key"),
        ('{"y": [1, 2]}', "keys must be equal to: x"),
        ('{"instances": [[1, 2]], "signature_name": "other"}', "not found in signature def"),
    ],
)
def test_json_that_cannot_be_used(body: str | bytes, text: str) -> None:
    status, found = error(invoke(double(), body))
    assert status == 400 and text in found


def test_rows_are_counted_for_batches() -> None:
    server = HostServer(double())
    call: Any = server.interface.route(
        "POST", "/invocations", {"content-type": JSON}, b"[[1,2],[3,4],[5,6]]", server
    )
    assert server.interface.decode(call.request, server.served["half"]).rows == 3


def test_methods_other_than_predict_need_json() -> None:
    chosen = {"x_amzn_sagemaker_custom_attributes": "tfs-method=classify"}
    status, text = error(invoke(double(), "1,2", CSV, **chosen))
    assert (status, text) == (400, "tfs-method=classify needs a body of application/json.")
    status, text = error(invoke(double(), "[1, 2]", JSON, **chosen))
    assert status == 400 and "examples" in text


# -------------------------------------------------------------------------------- content types
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-image", "application/octet-stream", "?"]
)
def test_unknown_content_type(kind: str) -> None:
    assert error(invoke(double(), "1,2", kind)) == (415, f"Unsupported Media Type: {kind}")


def test_missing_content_type() -> None:
    assert error(invoke(double(), "1,2", None)) == (415, "Unsupported Media Type: Unknown")


# -------------------------------------------------------------------------------------------- CSV
@pytest.mark.parametrize(
    "body", ["1,2\n3,4", "1,2\r\n3,4\r\n", "\n1 , 2\n\n3.0,4e0\n", '"1","2"\n3,4', "\ufeff1,2\n3,4"]
)
def test_csv_of_numbers(body: str) -> None:
    assert value(invoke(double(), body.encode(), CSV)) == DOUBLED


@pytest.mark.parametrize(
    ("shape", "body", "wanted"),
    [
        ((None,), "1\n2", [1.0, 2.0]),
        ((None, 1), "1\n2", [[1.0], [2.0]]),
        (None, "1\n2", [1.0, 2.0]),
        (None, "1,2", [[1.0, 2.0]]),
        ((None, 2, 2), "1,2,3,4", [[[1.0, 2.0], [3.0, 4.0]]]),
        ((None, None), "1,2,3", [[1.0, 2.0, 3.0]]),
        ((None, None, 2), "1,2,3,4", [[[1.0, 2.0], [3.0, 4.0]]]),
    ],
)
def test_a_line_of_csv_gets_the_shape_of_a_row(shape: Any, body: str, wanted: Any) -> None:
    assert value(invoke(echo(shape, "float32"), body, CSV)) == {"predictions": wanted}


def test_csv_of_text() -> None:
    body = 'a,"b, ""c"""\n1,"two\nlines"'
    wanted = [["a", 'b, "c"'], ["1", "two\nlines"]]
    assert value(invoke(echo((None, 2), "string"), body, CSV)) == {"predictions": wanted}


def test_csv_in_another_charset() -> None:
    kind = "text/csv; charset=latin-1"
    answer = invoke(echo((None, 1), "string"), "é".encode("latin-1"), kind)
    assert value(answer) == {"predictions": [["é"]]}
    assert error(invoke(double(), "1,2", "text/csv; charset=klingon"))[0] == 415


@pytest.mark.parametrize(
    ("dtype", "body", "wanted"),
    [("int32", "1,-2", [1, -2]), ("bool", "true,0", [True, False]), ("float64", "nan,inf", None)],
)
def test_csv_of_other_types(dtype: str, body: str, wanted: Any) -> None:
    found = value(invoke(echo((None, 2), dtype), body, CSV))["predictions"][0]
    assert found == wanted or (np.isnan(found[0]) and found[1] == np.inf)


@pytest.mark.parametrize(
    ("dtype", "body", "text"),
    [
        ("float32", "1,a", "must be of type float32"),
        ("float32", "1,", "must be of type float32"),
        ("float32", "1_0,2", "must be of type float32"),
        ("int32", "1.0,2", "must be of type int32"),
        ("int8", "1,300", "int8"),
        ("bool", "2,1", "must be of type bool"),
        ("float32", "1,2\n3", "equally many values. Received: 1 in row 2, 2 in row 1."),
        ("float32", "1,2,3", "must hold the values of a row of x"),
        ("float32", "", "a line for each row. Received: none."),
        ("float32", '1,"2', "The body must be CSV"),
        ("float32", b"\xff\xff", "must be text in utf-8"),
    ],
)
def test_csv_that_cannot_be_used(dtype: str, body: str | bytes, text: str) -> None:
    status, found = error(invoke(echo((None, 2), dtype), body, CSV))
    assert status == 400 and text in found


# ------------------------------------------------------------------------------------ npy and npz
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<i8", "|u1", "<f2", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(dtype: str, order: Any) -> None:
    rows = np.asarray([[1, 0], [0, 1]], dtype, order=order)
    wanted = {"predictions": [[2.0, 0.0], [0.0, 2.0]]}
    assert value(invoke(double(), _saved(rows), NPY)) == wanted


def test_npy_of_version_2_and_of_text() -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, ROWS, version=(2, 0))
    assert value(invoke(double(), stream.getvalue(), NPY)) == DOUBLED
    found = invoke(echo((None, 1), "string"), _saved(np.array([["é"], ["ab"]])), NPY)
    assert value(found) == {"predictions": [["é"], ["ab"]]}


def test_npz_by_names_and_by_order() -> None:
    a, b = ROWS, ROWS[::-1]
    wanted = [{"sum": [4, 6], "difference": [-2, -2]}, {"sum": [4, 6], "difference": [2, 2]}]
    for save in (np.savez, np.savez_compressed):
        for arrays in ((a, b), {"a": a, "b": b}):
            stream = io.BytesIO()
            save(stream, *arrays) if isinstance(arrays, tuple) else save(stream, **arrays)  # type: ignore[arg-type]
            assert value(invoke(two_inputs(), stream.getvalue(), NPZ)) == {"predictions": wanted}


def test_formats_of_one_array_need_one_input() -> None:
    for kind, body in ((NPY, _saved(ROWS)), (CSV, b"1,2")):
        status, text = error(invoke(two_inputs(), body, kind))
        assert status == 400 and "needs a model with one input" in text and "a, b" in text


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_sparse_matrices(kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    stream = io.BytesIO()
    matrix = np.array([[0, 2, 0], [1, 0, 0], [0, 0, 0], [0, 3, 4]], np.float32)
    sparse.save_npz(stream, sparse.csr_matrix(matrix).asformat(kind))
    found = value(invoke(echo((None, 3), "float32"), stream.getvalue(), NPZ))
    assert found == {"predictions": matrix.tolist()}


def test_duplicates_in_a_sparse_matrix_are_added() -> None:
    assert value(invoke(echo((None, 2), "float32"), _coo(), NPZ)) == {"predictions": [[0.0, 3.0]]}


@pytest.mark.parametrize(
    "change",
    [
        {"row": np.array([0, -1])},
        {"row": np.array([0, 1])},
        {"row": np.array([0.0, 0.0])},
        {"row": np.array([[0], [0]])},
        {"row": np.array([0])},
        {"shape": np.array([1, 2, 3])},
        {"shape": np.array([-1, 2])},
        {"format": np.array(b"bsr")},
        {"format": np.array([1, 2])},
        {"format": np.array(b"csr"), "indptr": np.array([0, 2]), "indices": np.array([0, 1, 1])},
        {"format": np.array(b"csr"), "indptr": np.array([0, -5, 2]), "indices": np.array([0, 1])},
        {"data": np.array(["a", "b"])},
    ],
)
def test_sparse_matrices_that_are_none(change: dict[str, Any]) -> None:
    assert error(invoke(echo((None, 2), "float32"), _coo(**change), NPZ))[0] == 400


def test_sparse_bomb() -> None:
    body = _coo(shape=np.array([10**9, 10**9]))
    assert error(invoke(echo((None, 2), "float32"), body, NPZ))[0] == 413


def test_pickles_are_refused() -> None:
    body = _saved(np.array([[{}, 1]], object))
    status, text = error(invoke(double(), body, NPY))
    assert status == 400 and "pickles" in text
    stream = io.BytesIO()
    np.savez(stream, x=np.array([{}], object))
    assert "pickles" in error(invoke(double(), stream.getvalue(), NPZ))[1]
    assert error(invoke(double(), pickle.dumps(ROWS), NPY))[0] == 400
    assert error(invoke(double(), pickle.dumps(ROWS), NPZ))[0] == 400


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }" % ("1," * 100),
        "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True,), }",
        "{'descr': '<f4', 'shape': (1,), }",
        "((((((((" * 100,
        "__import__('os')",
        "",
    ],
)
def test_npy_headers_that_lie(header: str) -> None:
    text = header.encode().ljust(118) + b"\n"
    body = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(4)
    assert error(invoke(double(), body, NPY))[0] == 400


def test_npy_of_another_length_than_its_header_says() -> None:
    for body in (_saved(ROWS)[:-1], _saved(ROWS) + b"x"):
        status, text = error(invoke(double(), body, NPY))
        assert status == 400 and "must fit what follows" in text


def test_inflation_is_bounded() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", _saved(np.zeros((10**5, 2), np.float32)))
    body = stream.getvalue()
    assert len(body) < 2000
    assert error(HostServer(double(), most=10**5).invoke(body, NPZ))[0] == 413
    assert len(value(HostServer(double(), most=10**6).invoke(body, NPZ))["predictions"]) == 10**5
    # The archive says that the member is small.
    size = len(_saved(np.zeros((10**5, 2), np.float32))).to_bytes(4, "little")
    assert body.count(size) == 2
    lying = body.replace(size, (1000).to_bytes(4, "little"))
    assert error(HostServer(double(), most=10**5).invoke(lying, NPZ))[0] == 400


def test_other_compressions_are_refused() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x.npy", _saved(ROWS))
    assert error(invoke(double(), stream.getvalue(), NPZ))[0] == 400


def test_random_bodies_are_answered_or_refused() -> None:
    draw = random.Random(7)
    seeds = {
        JSON: [b'{"instances": [[1, 2]]}', b"[1,2]\n[3,4]", b'{"x": [1e5, -2]}'],
        CSV: [b'1,2\n3,"4"', b"a,b"],
        NPY: [_saved(ROWS), _saved(np.array([["a"]]))],
        NPZ: [write_npz({"x": ROWS}), _coo()],
    }
    server = HostServer(double())
    for kind, bodies in seeds.items():
        for _ in range(400):
            answer = server.invoke(_changed(draw, draw.choice(bodies)), kind)
            assert answer.status in (200, 400, 413)
            json.loads(answer.body)


def _changed(draw: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(3)
        if kind == 0:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            changed[at:at] = draw.choice([b"[", b"{", b"(", b'"', b"\n", b"\x00", b"-", b"9" * 30])
        else:
            del changed[at : at + draw.randint(1, 9)]
    return bytes(changed)


def _coo(**change: Any) -> bytes:
    arrays = {
        "format": np.array(b"coo"),
        "shape": np.array([1, 2]),
        "data": np.array([1, 2], np.float32),
        "row": np.array([0, 0]),
        "col": np.array([1, 1]),
    }
    stream = io.BytesIO()
    np.savez(stream, **{**arrays, **change})
    return stream.getvalue()


def _saved(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_written_npy_is_what_numpy_writes() -> None:
    assert write_npy(ROWS) == _saved(ROWS)
