"""The Open Inference Protocol: paths, metadata, tensors of each type, bad input."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from served_fakes import FakeModel, FakeServer, ask, content, error, half_plus, signature

import nanotf
from nanotf.inference.signature import DEFAULT
from nanotf.serving.open_inference import OpenInference

V2 = OpenInference()
TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "string",
}


def _server() -> FakeServer:
    return FakeServer(V2, half_plus(3, "[?]"))


def _infer(model: FakeModel, body: Any, headers: Any = None) -> Any:
    text = body if isinstance(body, bytes) else json.dumps(body)
    path = f"/v2/models/{model.name}/infer"
    return ask(FakeServer(V2, model), V2, "POST", path, text, headers)


def _tensor(name: str = "x", shape: Any = (1,), datatype: Any = "FP32", data: Any = (1,)) -> Any:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def test_the_example_of_the_specification() -> None:
    model = FakeModel(
        {DEFAULT: signature("input0:uint32[?,2] input1:bool[?]", "o:int64[] output0:float32[?,2]")},
        lambda input0, input1: {
            "o": np.int64(1),
            "output0": np.float32([[1, 1.1], [2, 2.1], [3, 3.1]]),
        },
        "mymodel",
    )
    body = {
        "id": "42",
        "inputs": [
            _tensor("input0", [2, 2], "UINT32", [1, 2, 3, 4]),
            _tensor("input1", [1], "BOOL", [True]),
        ],
        "outputs": [{"name": "output0"}],
    }
    answer = _infer(model, body)
    assert answer.body == (
        b'{"model_name":"mymodel","model_version":"123","id":"42","outputs":[{"name":"output0",'
        b'"shape":[3,2],"datatype":"FP32","data":[1.0,1.1,2.0,2.1,3.0,3.1]}]}'
    )
    del body["outputs"], body["id"]
    found = content(_infer(model, body))
    assert "id" not in found
    assert found["outputs"][0] == {"name": "o", "shape": [], "datatype": "INT64", "data": [1]}


@pytest.mark.parametrize("datatype", TYPES)
def test_types(datatype: str) -> None:
    dtype = TYPES[datatype]
    model = FakeModel({DEFAULT: signature(f"x:{dtype}*", f"y:{dtype}*")}, lambda x: {"y": x})
    drawn = random.Random(0)
    for shape in ([], [1], [5], [2, 3], [3, 1, 2], [0], [4, 0]):
        size = int(np.prod(shape))
        data: list[Any] = [drawn.randrange(2) for _ in range(size)]
        if datatype in ("BOOL", "BYTES"):
            data = [bool(each) if datatype == "BOOL" else f"t{each}" for each in data]
        natural = np.array(data, object).reshape(shape).tolist() if len(shape) > 1 else data
        for sent in (data, natural):
            answer = _infer(model, {"inputs": [_tensor("x", shape, datatype, sent)]})
            assert content(answer)["outputs"] == [_tensor("y", shape, datatype, data)]


def test_values_that_are_not_finite() -> None:
    answer = _infer(half_plus(0), {"inputs": [_tensor(shape=[2], data=[float("nan"), 1])]})
    assert answer.headers == (("X-Nanotf-Nonfinite", "1"),) and b"[NaN,0.5]" in answer.body


def test_the_server() -> None:
    assert content(ask(_server(), V2, "GET", "/v2")) == {
        "name": "nanotf",
        "version": nanotf.__version__,
        "extensions": [],
    }
    assert content(ask(_server(), V2, "GET", "/v2/"))["name"] == "nanotf"
    assert content(ask(_server(), V2, "GET", "/v2/health/live")) == {"live": True}
    assert content(ask(_server(), V2, "GET", "/v2/health/ready")) == {"ready": True}
    answer = ask(FakeServer(V2), V2, "GET", "/v2/health/ready")
    assert answer is not None and answer.status == 503 and content(answer) == {"ready": False}


def test_a_model() -> None:
    model = FakeModel(
        {DEFAULT: signature("x:float32[?,8] t:string[?]", "y:bfloat16*")}, lambda **_: {}, "a b"
    )
    server = FakeServer(V2, model)
    server.other_states["a b"] = [(124, "LOADING", ""), (122, "AVAILABLE", "")]
    for path in ("/v2/models/a%20b", "/v2/models/a%20b/versions/123"):
        found = content(ask(server, V2, "GET", path))
        assert found == {
            "name": "a b",
            "versions": ["123", "122"],
            "platform": "nanotf_program",
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [-1, 8]},
                {"name": "t", "datatype": "BYTES", "shape": [-1]},
            ],
            "outputs": [{"name": "y", "datatype": "BF16", "shape": [-1]}],
        }
    for version, status in (("", 200), ("/versions/123", 200), ("/versions/124", 503)):
        answer = ask(server, V2, "GET", f"/v2/models/a%20b{version}/ready")
        assert answer is not None and answer.status == status
        assert content(answer) == {"name": "a b", "ready": status == 200}


def test_a_model_without_signatures_is_described() -> None:
    found = content(ask(FakeServer(V2, FakeModel({}, dict)), V2, "GET", "/v2/models/half"))
    assert found["inputs"] == found["outputs"] == []


@pytest.mark.parametrize("path", ["/", "/v1/models/half", "/v22", "/x/v2"])
def test_other_paths_belong_to_others(path: str) -> None:
    assert V2.route("GET", path, {}, b"", _server()) is None


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v2/nothing", 404, "no such request. Received: GET /v2/nothing"),
        ("POST", "/v2", 404, "no such request"),
        ("GET", "/v2/models/half/infer", 404, "no such request"),
        ("POST", "/v2/models/half", 404, "no such request"),
        ("POST", "/v2/models/other/infer", 404, "must have the model. Received: other"),
        ("GET", "/v2/models/other/ready", 404, "must have the model. Received: other"),
        ("POST", "/v2/models/half/versions/5/infer", 404, "Specific(half, 5)"),
        ("GET", "/v2/models/half/versions/5", 404, "Specific(half, 5)"),
        ("GET", "/v2/models/half/versions/v5", 400, "whole number. Received: v5"),
        ("GET", f"/v2/models/half/versions/{'1' * 5000}", 400, "whole number"),
    ],
)
def test_wrong_requests(method: str, path: str, status: int, text: str) -> None:
    found, received = error(ask(_server(), V2, method, path))
    assert found == status and text in received


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "The document is empty"),
        (b"[]", "Is not object"),
        ({}, "inputs must be x. Received: none"),
        ({"inputs": {}}, '"inputs" must be a list of objects'),
        ({"inputs": [{"shape": [1]}]}, '"inputs" must be a list of objects'),
        ({"inputs": [_tensor("z")]}, "Each of the inputs x must be sent once. Received: z"),
        ({"inputs": [_tensor(), _tensor()]}, "must be sent once. Received: x"),
        ({"inputs": [_tensor(datatype="FP64")]}, 'datatype FP32. Received: "FP64"'),
        ({"inputs": [_tensor(datatype=None)]}, "datatype FP32. Received: null"),
        ({"inputs": [_tensor(shape=None)]}, 'x must have a "shape"'),
        ({"inputs": [_tensor(shape=[-1])]}, 'x must have a "shape"'),
        ({"inputs": [_tensor(shape=[1.0])]}, 'x must have a "shape"'),
        ({"inputs": [_tensor(shape=[True])]}, 'x must have a "shape"'),
        ({"inputs": [_tensor(shape=[10**12])]}, r"data of the shape \[1\]"),
        ({"inputs": [_tensor(shape=[1, 1])]}, r"shape \(None,\). Received: \(1, 1\)"),
        ({"inputs": [_tensor(shape=[4], data=[[1, 2], [3, 4]])]}, r"or be flat.*\[2, 2\]"),
        ({"inputs": [_tensor(shape=[1] * 100)]}, "a shape that NumPy has|must have the shape"),
        ({"inputs": [_tensor(shape=[0, 2**62, 2**62], data=[])]}, "NumPy has|must have the shape"),
        ({"inputs": [_tensor(data=1)]}, 'x must have "data", a list. Received: 1'),
        ({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32"}]}, "Received: null"),
        ({"inputs": [_tensor(data=["1"])]}, "not of expected type: float"),
        ({"inputs": [_tensor(data=[True])]}, "Type: True is not of expected type"),
        ({"inputs": [_tensor()], "id": 1}, '"id" must be a text. Received: 1'),
        ({"inputs": [_tensor()], "outputs": [{"name": "z"}]}, "some of y, each once. Received: z"),
        ({"inputs": [_tensor()], "outputs": [{"name": "y"}] * 2}, "Received: y, y"),
        ({"inputs": [_tensor()], "outputs": 1}, '"outputs" must be a list'),
    ],
)
def test_bad_input(body: Any, text: str) -> None:
    status, received = error(_infer(half_plus(0, "[?]"), body))
    assert status == 400 and re.search(text, received), received


def test_binary_data_is_refused() -> None:
    status, text = error(_infer(half_plus(0), b"{}", {"inference-header-content-length": "2"}))
    assert status == 400 and "Received: the extension for binary data" in text


def test_a_model_without_the_signature() -> None:
    status, text = error(_infer(FakeModel({}, dict), {"inputs": []}))
    assert status == 400 and "must have the signature serving_default. Received: none" in text


def test_cut_and_changed_bodies_are_refused_or_answered() -> None:
    drawn = random.Random(0)
    body = json.dumps(
        {"id": "a", "inputs": [_tensor(shape=[2], data=[1.5, 2])], "outputs": [{"name": "y"}]}
    ).encode()
    statuses = set()
    for _ in range(1500):
        text = bytearray(body[: drawn.choice([len(body), drawn.randrange(len(body))])])
        for _ in range(drawn.randint(0, 3) if text else 0):
            text[drawn.randrange(len(text))] = drawn.choice(b'[]{}",:01.eE-NIn\\ \xff')
        statuses.add(_infer(half_plus(0, "[?]"), bytes(text)).status)
    assert statuses == {200, 400}
