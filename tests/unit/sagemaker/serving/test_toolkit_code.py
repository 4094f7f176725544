"""A user's `model_fn`, `input_fn`, `predict_fn`, `output_fn` and `transform_fn`."""

from __future__ import annotations

import io
import json
import logging
import pathlib
from typing import Any

import numpy as np
import pytest
from hosting_fakes import (
    CSV,
    JSON,
    NPY,
    NPZ,
    HostServer,
    double,
    error,
    two_inputs,
    value,
    with_code,
)

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.serving.numpy_bodies import write_npy, write_npz

MODEL = "def model_fn(model_dir): return lambda rows: {'first': rows[0], 'dir': model_dir}\n"
STEPS = """
def model_fn(model_dir):
    return "model"
def input_fn(data, content_type):
    return ["input", repr(data), content_type]
def predict_fn(data, model):
    return [*data, model]
def output_fn(prediction, accept):
    return " ".join(map(str, prediction)) + " " + accept
"""
WITH_CONTEXT = """
import json
seen = []
def pre_model_fn(model_dir, context):
    seen.append(("before", context.system_properties["model_dir"] == model_dir))
def model_fn(model_dir, context):
    seen.append("model")
    return "model"
def model_warmup_fn(model_dir, model, context):
    seen.append(("after", model))
def input_fn(data, content_type, context):
    return context.get_request_header(0, "X-Mine")
def predict_fn(data, model, context):
    return [data, context.get_all_request_header(0)["x-mine"]]
def output_fn(prediction, accept, context):
    return json.dumps([seen, prediction, context.get_request_header(0, "x-none")]), "a/b"
"""
ROWS = "[[1, 2], [3, 4]]"


def _serve(folder: pathlib.Path, script: str, model: Any = None) -> HostServer:
    return HostServer(with_code(model or double(), folder, script))


def test_all_steps(tmp_path: pathlib.Path) -> None:
    server = _serve(tmp_path, STEPS)
    assert server.computed_by_code == [True]
    answer = server.invoke("1,2", "text/csv", accept="x/y, z")
    assert answer.body == b"input '1,2' text/csv model x/y, z"
    assert answer.content_type == "x/y, z"
    for accept in (None, "*/*"):
        assert (
            server.invoke("", "a/b", accept=accept).body == b"input b'' a/b model " + JSON.encode()
        )
    assert server.served["half"].runs == 0


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (JSON, "'é'"),
        (CSV, "'é'"),
        ("text/csv; charset=utf-8", "'é'"),
        (NPY, repr("é".encode())),
        ("application/octet-stream", repr("é".encode())),
    ],
)
def test_text_and_bytes(tmp_path: pathlib.Path, kind: str, data: str) -> None:
    assert f"input {data} {kind}" in _serve(tmp_path, STEPS).invoke("é", kind).body.decode()
    if data.startswith("'"):
        assert error(_serve(tmp_path / "2", STEPS).invoke(b"\xff", kind))[0] == 400


def test_context(tmp_path: pathlib.Path) -> None:
    server = _serve(tmp_path, WITH_CONTEXT)
    for _ in range(2):  # the model is loaded once
        answer = server.invoke("", "a/b", x_mine="header")
        assert answer.content_type == "a/b"
        seen = [["before", True], "model", ["after", "model"]]
        assert json.loads(answer.body) == [seen, ["header", "header"], None]


@pytest.mark.parametrize(
    ("kind", "body", "wanted"),
    [
        (JSON, ROWS, [1, 2]),
        (CSV, "1,2\n3,4", [1.0, 2.0]),
        (NPY, write_npy(np.array([[5, 6]])), [5, 6]),
    ],
)
def test_defaults_around_the_users_model(
    tmp_path: pathlib.Path, kind: str, body: str | bytes, wanted: list[float]
) -> None:
    found = value(_serve(tmp_path, MODEL).invoke(body, kind))
    assert found == {"first": wanted, "dir": str(tmp_path)}


def test_default_answers_of_the_users_model(tmp_path: pathlib.Path) -> None:
    server = _serve(tmp_path, "def model_fn(model_dir): return lambda rows: rows * 2\n")
    assert server.invoke(ROWS, accept=CSV).body == b"2,4\n6,8\n"
    assert np.load(io.BytesIO(server.invoke(ROWS, accept=NPY).body)).tolist() == [[2, 4], [6, 8]]
    assert value(server.invoke(ROWS, accept="*/*")) == [[2, 4], [6, 8]]
    assert error(server.invoke(ROWS, accept="text/html"))[0] == 406
    assert error(server.invoke(ROWS, "text/html"))[0] == 415
    assert error(server.invoke("[[1], [1, 2]]"))[0] == 400
    assert error(server.invoke("[[1"))[0] == 400


def test_named_arrays_for_the_users_model(tmp_path: pathlib.Path) -> None:
    server = _serve(tmp_path, "def model_fn(model_dir): return lambda named: named['a']\n")
    assert value(server.invoke(write_npz({"a": np.array([1])}), NPZ)) == [1]


def test_predictions_that_json_cannot_hold(tmp_path: pathlib.Path) -> None:
    server = _serve(tmp_path, "def model_fn(model_dir): return lambda rows: object()\n")
    status, text = error(server.invoke(ROWS))
    assert status == 500 and "received a object. Define output_fn." in text


def test_predict_fn_gets_the_program(tmp_path: pathlib.Path) -> None:
    script = "def predict_fn(data, model): return model(data)[:1]\n"
    server = _serve(tmp_path, script)
    assert server.computed_by_code == [False]
    assert value(server.invoke(ROWS)) == [[2.0, 4.0]]
    status, text = error(server.invoke("[[1, 2, 3]]"))
    assert status == 500 and "x must have the shape" in text


def test_program_of_several_inputs(tmp_path: pathlib.Path) -> None:
    script = "def predict_fn(data, model): return model({'a': data, 'b': data})['sum']\n"
    assert value(_serve(tmp_path, script, two_inputs()).invoke(ROWS)) == [[2.0, 4.0], [6.0, 8.0]]
    for script, text in (
        ("def predict_fn(data, model): return model(data)\n", "Pass a dict of arrays by name."),
        ("def predict_fn(data, model): return model(data, 'x')\n", "must be one of the model's"),
    ):
        folder = tmp_path / str(len(script))
        assert text in error(_serve(folder, script, two_inputs()).invoke(ROWS))[1]


def test_input_fn_alone_leaves_batches_to_the_server(tmp_path: pathlib.Path) -> None:
    script = "def input_fn(data, content_type): return [[float(n) for n in data.split()]]\n"
    server = _serve(tmp_path, script)
    assert server.computed_by_code == [False]
    assert value(server.invoke("1 2", CSV)) == {"predictions": [[2.0, 4.0]]}
    assert server.invoke("1 2", CSV, accept=CSV).body == b"2.0,4.0\n"
    assert server.served["half"].runs == 2
    call: Any = server.interface.route(
        "POST", "/invocations", {"content-type": CSV}, b"1 2", server
    )
    assert server.interface.decode(call.request, server.served["half"]).rows == 1
    assert error(server.invoke("1 2 3", CSV))[0] == 400
    assert error(server.invoke("a", CSV)) == (500, "could not convert string to float: 'a'")


def test_output_fn_alone_leaves_batches_to_the_server(tmp_path: pathlib.Path) -> None:
    script = "def output_fn(prediction, accept): return f'{prediction.sum()} for {accept}'\n"
    server = _serve(tmp_path, script)
    assert server.invoke(ROWS, accept="text/html").body == b"20.0 for text/html"
    assert server.invoke("1,2", CSV).body == b"6.0 for application/json"
    script = "def output_fn(prediction, accept): return ','.join(prediction)\n"
    body = '{"a": [1, 2], "b": [1, 2]}'
    assert _serve(tmp_path / "2", script, two_inputs()).invoke(body).body == b"sum,difference"


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        (
            MODEL + "def transform_fn(model, data, content_type, accept): "
            "return f'{model([1])[\"first\"]} {data} {content_type} {accept}'\n",
            b"1 3,4 text/csv c/d",
        ),
        (
            "def transform_fn(model, data, content_type, accept, context): "
            "return str(model([[1, 2]])), context.get_request_header(0, 'accept')\n",
            b"[[2. 4.]]",
        ),
        (
            "def transform_fn(data, content_type, accepts): "
            "return f'{data} {content_type}', accepts\n",
            b"3,4 text/csv",
        ),
    ],
)
def test_transform_fn(tmp_path: pathlib.Path, script: str, wanted: bytes) -> None:
    server = _serve(tmp_path, script)
    assert server.computed_by_code == ["context" not in script]
    answer = server.invoke("3,4", CSV, accept="c/d")
    assert (answer.body, answer.content_type) == (wanted, "c/d")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            STEPS + "def transform_fn(a, b, c): ...\n",
            "transform_fn must not be defined beside input_fn, predict_fn, output_fn.",
        ),
        ("def input_fn(data): ...\n", "input_fn must have 2 parameters, or 3 to get the context"),
        ("def predict_fn(a, b, c, d): ...\n", "Received: a function with 4."),
        ("def transform_fn(a, b): ...\n", "transform_fn must have 4 parameters"),
    ],
)
def test_functions_that_cannot_be_called(tmp_path: pathlib.Path, script: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        _serve(tmp_path, script)


@pytest.mark.parametrize("name", ["pre_model_fn", "model_fn"])
def test_a_model_that_does_not_load(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(OSError, match="no such weights"):
        _serve(tmp_path, f"def {name}(model_dir): raise OSError('no such weights')\n")


def test_a_warm_up_that_fails(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _serve(tmp_path, MODEL + "def model_warmup_fn(model_dir, model): 1 / 0\n")


@pytest.mark.parametrize("name", ["input_fn", "predict_fn", "output_fn"])
def test_errors_of_a_step(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    script = f"def {name}(a, b): raise KeyError('of the user')\n"
    with caplog.at_level(logging.ERROR, "nanotf"):
        assert error(_serve(tmp_path, script).invoke(ROWS)) == (500, "'of the user'")
    assert f"{name} of the model's code" in caplog.text and "inference.py" in caplog.text


def test_an_answer_that_is_none(tmp_path: pathlib.Path) -> None:
    server = _serve(tmp_path, "def output_fn(prediction, accept): return prediction\n")
    status, text = error(server.invoke(ROWS))
    assert status == 500 and "output_fn must return text or bytes. Received: ndarray." in text
