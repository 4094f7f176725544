"""Tensors of the Open Inference Protocol over gRPC: each type, raw and not, and wrong ones."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from nanotf.errors import NanoError
from nanotf.inference.signature import DEFAULT
from nanotf.serving.remote.inference_messages import message_class
from nanotf.serving.remote.inference_service import InferenceService
from tests.unit.serving.served_fakes import FakeModel, FakeServer, ask, signature

V2 = InferenceService()
PATH = "/inference.GRPCInferenceService/ModelInfer"
TYPES = {
    "BOOL": ("bool", "bool_contents", [True, False]),
    "INT8": ("int8", "int_contents", [-128, 127]),
    "INT16": ("int16", "int_contents", [-(2**15), 5]),
    "INT32": ("int32", "int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64", "int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint8", "uint_contents", [0, 255]),
    "UINT16": ("uint16", "uint_contents", [0, 2**16 - 1]),
    "UINT32": ("uint32", "uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64", "uint64_contents", [0, 2**64 - 1]),
    "FP16": ("float16", "", [1.5, -2]),
    "FP32": ("float32", "fp32_contents", [1.5, float("inf")]),
    "FP64": ("float64", "fp64_contents", [1e300, -0.1]),
    "BYTES": ("string", "bytes_contents", [b"\x00\xff", b""]),
}


def _model(dtype: str) -> FakeModel:
    specs = f"x:{dtype}[?,2]", f"y:{dtype}[?,2]"
    return FakeModel({DEFAULT: signature(*specs)}, lambda x: {"y": x})


def _request(datatype: str, shape: Any = (1, 2), name: str = "x", **fields: Any) -> Any:
    request = message_class("ModelInferRequest")(model_name="half", id="42", **fields)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def _answer(request: Any, model: FakeModel) -> Any:
    found = ask(FakeServer(V2, model), V2, "POST", PATH, request.SerializeToString())
    assert found is not None
    if found.status >= 400:
        return found.status, found.body.decode()
    return message_class("ModelInferResponse").FromString(found.body)


def _raw(dtype: str, values: list[Any]) -> bytes:
    if dtype == "string":
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return np.array(values, dtype).tobytes()


@pytest.mark.parametrize("datatype", TYPES)
def test_raw_contents(datatype: str) -> None:
    dtype, _, values = TYPES[datatype]
    raw = _raw(dtype, values)
    answer = _answer(_request(datatype, raw_input_contents=[raw]), _model(dtype))
    assert list(answer.raw_output_contents) == [raw]
    assert (answer.model_name, answer.model_version, answer.id) == ("half", "123", "42")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", datatype, [1, 2])
    assert not output.HasField("contents")


@pytest.mark.parametrize("datatype", [name for name in TYPES if name != "FP16"])
def test_contents(datatype: str) -> None:
    dtype, field, values = TYPES[datatype]
    request = _request(datatype)
    getattr(request.inputs[0].contents, field).extend(values)
    answer = _answer(request, _model(dtype))
    found = getattr(answer.outputs[0].contents, field)
    assert not answer.raw_output_contents
    if isinstance(found, bytes):
        found = np.frombuffer(found, dtype)
    assert list(found) == list(np.array(values, object if dtype == "string" else dtype))


def test_no_rows() -> None:
    answer = _answer(_request("FP32", (0, 2), raw_input_contents=[b""]), _model("float32"))
    assert (list(answer.outputs[0].shape), list(answer.raw_output_contents)) == ([0, 2], [b""])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (_request("INT64", raw_input_contents=[bytes(8)]), "must have the datatype FP32"),
        (_request("FP32", raw_input_contents=[bytes(7)]), "elements of 4 bytes"),
        (_request("FP32", raw_input_contents=[bytes(4)]), "1 values"),
        (_request("FP32", raw_input_contents=[bytes(8)] * 2), "1 elements"),
        (_request("FP32", (-1, 2), raw_input_contents=[bytes(8)]), "a shape"),
        (_request("FP32", (2,), raw_input_contents=[bytes(8)]), r"shape \(None, 2\)"),
        (_request("FP32", (0,) * 90, raw_input_contents=[b""]), "NumPy"),
        (_request("FP32"), "0 values"),
        (_request("FP32", name="z", raw_input_contents=[bytes(8)]), "x must be sent once"),
        (message_class("ModelInferRequest")(model_name="half"), "inputs must be"),
    ],
)
def test_wrong_tensors(request_: Any, text: str) -> None:
    status, found = _answer(request_, _model("float32"))
    assert status == 400
    assert re.search(text, found), found


def test_numbers_and_texts_that_do_not_fit() -> None:
    request = _request("INT8")
    request.inputs[0].contents.int_contents.extend([1, 300])
    assert "numbers of the type int8" in _answer(request, _model("int8"))[1]
    for raw in (b"\x01", b"\x02\x00\x00\x00a", b"\xff\xff\xff\xff"):
        found = _answer(_request("BYTES", raw_input_contents=[raw]), _model("string"))
        assert "end too early" in found[1]
    assert "raw_input_contents" in _answer(_request("FP16"), _model("float16"))[1]


def test_outputs_that_a_client_wants() -> None:
    request = _request("FP32", raw_input_contents=[bytes(8)])
    request.outputs.add(name="y")
    assert [each.name for each in _answer(request, _model("float32")).outputs] == ["y"]
    request.outputs.add(name="z")
    assert "Outputs must be some of y" in _answer(request, _model("float32"))[1]


def test_random_bytes_are_refused() -> None:
    rng = random.Random(5)
    good = _request("FP32", raw_input_contents=[bytes(8)]).SerializeToString()
    model = _model("float32")
    server = FakeServer(V2, model)
    for _ in range(2000):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            answer = ask(server, V2, "POST", PATH, bytes(body))
        except NanoError as error:
            raise AssertionError(bytes(body)) from error
        assert answer is not None and answer.status in (200, 400, 404)
