"""Types of answers, chosen by the header Accept."""

from __future__ import annotations

import io
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

ROWS = "[[1, 2], [0.1, 4]]"
TWO = '{"a": [1, 2], "b": [3, 4]}'


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        (JSON, JSON),
        ("application/jsonlines", JSON_LINES),
        ("application/jsonlines, application/json", JSON_LINES),
        ("image/png, application/json", JSON),
        ("text/csv, application/json", CSV),
        ("text/csv;q=0.5, application/json", JSON),
        ("text/csv;q=0, */*;q=0.1", JSON),
        ("text/*", CSV),
        ("TEXT/CSV; header=absent", CSV),
        ("application/x-npy", NPY),
        ("application/x-npz", NPZ),
        ("text/csv;q=x, application/x-npy", NPY),
    ],
)
def test_accept(accept: str | None, wanted: str) -> None:
    answer = invoke(double(), ROWS, accept=accept)
    assert (answer.status, answer.content_type) == (200, wanted)


@pytest.mark.parametrize("accept", ["text/html", "tensor/pt", "image/*", ",", "a;q=,"])
def test_types_that_there_are_not(accept: str) -> None:
    model = double()
    status, text = error(invoke(model, ROWS, accept=accept))
    assert status == 406 and "The answer can be one of application/json" in text
    assert model.runs == 0


def test_json_is_one_line_for_both_types() -> None:
    for accept in (JSON, JSON_LINES):
        answer = invoke(double(), ROWS, accept=accept)
        assert answer.body == b'{"predictions":[[2.0,4.0],[0.2,8.0]]}'


def test_csv_has_the_digits_of_the_type() -> None:
    assert invoke(double(), ROWS, accept=CSV).body == b"2.0,4.0\n0.2,8.0\n"


@pytest.mark.parametrize(
    ("shape", "body", "wanted"),
    [
        ((None,), "1\n2", b"2.0\n4.0\n"),
        ((None, 2, 2), "[[[1, 2], [3, 4]]]", b"2.0,4.0,6.0,8.0\n"),
        ((None, 0), "[[]]", b"\n"),
    ],
)
def test_csv_has_a_line_for_each_row(shape: Any, body: str, wanted: bytes) -> None:
    assert invoke(double(shape), body, accept=CSV).body == wanted


def test_csv_of_text() -> None:
    answer = invoke(echo((None, 2), "string"), '[["a", "b, \\"c\\""]]', accept=CSV)
    assert answer.body == b'a,"b, ""c"""\n'
    raw = '{"instances": [[{"b64": "/w=="}, "a"]]}'
    assert error(invoke(echo((None, 2), "string"), raw, accept=CSV))[0] == 406


def test_npy() -> None:
    found = np.load(io.BytesIO(invoke(double(), ROWS, accept=NPY).body))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32([[2, 4], [0.2, 8]]))
    text = np.load(io.BytesIO(invoke(echo((None,), "string"), '"a"\n"bc"', accept=NPY).body))
    assert text.tolist() == [b"a", b"bc"]


def test_npz_holds_all_outputs() -> None:
    found = np.load(io.BytesIO(invoke(two_inputs(), TWO, accept=NPZ).body))
    assert {name: found[name].tolist() for name in found} == {
        "sum": [[4, 6]],
        "difference": [[-2, -2]],
    }


@pytest.mark.parametrize("accept", [CSV, NPY])
def test_formats_of_one_array_need_one_output(accept: str) -> None:
    status, text = error(invoke(two_inputs(), TWO, accept=accept))
    assert status == 406 and "sum, difference" in text and NPZ in text


def test_numbers_that_are_not_finite() -> None:
    answer = invoke(echo((None, 2), "float32"), "nan,inf", CSV)
    assert answer.body == b'{"predictions":[[NaN,Infinity]]}'
    assert invoke(echo((None, 2), "float32"), "nan,inf", CSV, accept=CSV).body == b"nan,inf\n"


def test_default_type() -> None:
    assert HostServer(double(), accept=CSV).invoke(ROWS).content_type == CSV
    assert HostServer(double(), accept=CSV).invoke(ROWS, accept="*/*").content_type == CSV
    assert value(HostServer(double(), accept=CSV).invoke(ROWS, accept=JSON))
