"""Nested lists to arrays and back: random shapes and types; NumPy's way against the slow one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from nanotf.serving import json_tensors, json_text
from nanotf.serving.interface import Refusal

pytest.importorskip("orjson")

NUMBERS = [
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
]
SHAPES = [(), (1,), (7,), (0,), (3, 0), (1, 8, 8, 1), (5, 3), (2, 1, 3, 2), (1,) * 31]


def _random(dtype: str, shape: tuple[int, ...], drawn: np.random.Generator) -> Any:
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return drawn.random(shape) < 0.5
    if kind.kind == "f":
        found = drawn.normal(size=shape) * 10.0 ** drawn.integers(-4, 4, shape)
        odd = drawn.random(shape) < 0.1
        return np.where(odd, drawn.choice([np.nan, np.inf, -np.inf], shape), found).astype(kind)
    limits = np.iinfo(kind)
    return drawn.integers(limits.min, limits.max, shape, kind, endpoint=True)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_arrays_return_as_they_were(dtype: str) -> None:
    drawn = np.random.default_rng(0)
    for shape in SHAPES:
        array = np.asarray(_random(dtype, shape, drawn))
        text, finite = json_tensors.tensor_text(array)
        assert finite == (dtype[0] != "f" or bool(np.isfinite(array).all()))
        found = json_tensors.tensor(json_text.parse(text), dtype)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array, equal_nan=dtype[0] == "f")
        # An empty list does not tell the lengths of the axes after it.
        assert found.shape == array.shape or not array.size
        if len(shape) > 1:
            rows = json_tensors.rows(json_text.parse(text), dtype)
            assert np.array_equal(rows, array, equal_nan=dtype[0] == "f")


def test_texts_return_as_they_were() -> None:
    values = [b"", b"\x00", b"a\x00", "\u00e4\U0001f600".encode(), b"null"]
    array = np.empty(4, object)
    array[:] = values[1:]
    for shape in ((4,), (2, 2), (1, 4, 1)):
        for as_bytes in (False, True):
            text, finite = json_tensors.tensor_text(array.reshape(shape), as_bytes)
            found = json_tensors.tensor(json_text.parse(text), "string")
            assert finite and found.shape == shape and found.ravel().tolist() == values[1:]
    for scalar in (np.array("x"), np.array(b"x", object)):
        assert json_tensors.tensor_text(scalar) == (b'"x"', True)


@pytest.mark.parametrize("dtype", [">f4", "<i8", "float32"])
def test_arrays_in_any_order(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    for each in (array, array.T, array[::2, ::-1], array[1:, 2]):
        text, _ = json_tensors.tensor_text(each)
        assert json.loads(text) == each.tolist()


def _value(drawn: random.Random, depth: int) -> Any:
    if depth and drawn.random() < 0.8:
        count = drawn.choice([0, 1, 2, 2, 2, 3])
        first = _value(drawn, depth - 1)
        alike = drawn.random() < 0.7
        return [first if alike else _value(drawn, depth - 1) for _ in range(count)]
    leaves = [1, 1.5, 0, -3, 2**40, 2**63, -(2**63), None, True, "1", {}, {"b64": "YQ=="}]
    return drawn.choice(leaves[: drawn.choice([2, 4, len(leaves)])])


def _read(function: Any, *arguments: Any) -> Any:
    try:
        array = function(*arguments)
    except Refusal as refusal:
        return refusal.status, refusal.text
    return array.dtype, array.shape, array.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint64", "bool"])
def test_values_at_once_are_those_one_by_one(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(1)
    values = [_value(drawn, 4) for _ in range(3000)]
    lists = [value for value in values if isinstance(value, list) and value]

    def read() -> list[Any]:
        found = [_read(json_tensors.tensor, value, dtype) for value in values]
        return found + [_read(json_tensors.rows, value, dtype) for value in lists]

    at_once = read()
    monkeypatch.setattr(json_tensors, "_at_once", lambda *_: None)
    assert at_once == read()
    assert {len(outcome) for outcome in at_once} == {2, 3}


def test_a_long_text_beside_numbers_costs_its_own_length() -> None:
    """An array of NumPy's strings would have the longest one's length for each value."""
    values = [*range(10_000), "x" * 1_000_000]
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="is not of expected type: float"):
            json_tensors.tensor(values, "float32")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_booleans_are_no_numbers() -> None:
    with pytest.raises(Refusal, match="Type: True"):
        json_tensors.tensor([1, True], "float32")
    assert json_tensors.tensor([True, False], "bool").tolist() == [True, False]


def test_large_whole_numbers_become_floats_with_and_without_tokens() -> None:
    for digits in ("9" * 19, "18446744073709551615", "18446744073709551616", "-" + "9" * 20):
        plain = json_text.parse(f"[{digits}]".encode())
        (_, other) = json_text.parse(f"[NaN,{digits}]".encode())
        assert plain == [other] and type(plain[0]) is type(other)


def test_a_mark_of_the_byte_order_is_skipped() -> None:
    assert json_text.parse(b"\xef\xbb\xbf[1]") == [1]


def test_values_in_errors_are_short() -> None:
    assert json_text.shown([1.0, None, "\u00e4"]) == '[1.0, null, "\u00e4"]'
    assert json_text.shown("x" * 10_000) == '"' + "x" * 255 + "..."
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert json_text.shown(deep) == "[" * 256 + "..."


CODE = """
import sys
from nanotf.serving.open_inference import OpenInference
from nanotf.serving.tensorflow_rest import TensorflowRest
from nanotf.serving.interface import Refusal

class Server:
    def states(self, model):
        return [(1, "AVAILABLE", "")]

def heavy():
    return sorted({"tensorflow", "keras", "numpy"} & set(sys.modules))

rest, v2 = TensorflowRest(), OpenInference()
calls = [
    (rest, rest.route("POST", "/v1/models/m:predict", {}, b'{"instances": [1]}', Server())),
    (v2, v2.route("POST", "/v2/models/m/infer", {}, b'{"inputs": [{"name": "x", "shape": [1], '
        b'"datatype": "FP32", "data": [1]}]}', Server())),
]
for interface, _ in calls:
    interface.refuse(Refusal(400, "no"))
print("front", heavy())

from nanotf.inference.signature import Signature, TensorSpec
import numpy as np

class Model:
    name, version = "m", 1
    signatures = {"serving_default": Signature(
        (TensorSpec("x", "float32", (None,)),), (TensorSpec("y", "float32", (None,)),))}

for interface, call in calls:
    decoded = interface.decode(call.request, Model)
    answer = interface.encode(decoded, {"y": decoded.inputs["x"]}, Model)
    assert answer.status == 200, answer
    interface.describe(Model)
print("worker", heavy())
"""


def test_what_is_imported() -> None:
    """The front needs no NumPy, and a worker no TensorFlow, for all but examples."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["front []", "worker ['numpy']"], done.stderr


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_a_long_text_among_numbers_takes_no_memory(dtype: str) -> None:
    """NumPy would give each value of the list the room of the longest one."""
    values = [True if dtype == "bool" else 1] * 2000 + ["9" * 20_000]
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="Type: String is not of expected type"):
            json_tensors.rows(values, dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20, peak  # 160 MiB
