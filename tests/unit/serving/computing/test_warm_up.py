"""The first calls of a model: made-up rows, and the requests that came with it."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf.inference.signature import CLASSIFY, DEFAULT, PREDICT, REGRESS, Signature, TensorSpec
from nanotf.serving.computing import warm_up
from nanotf.serving.remote.serving_messages import message_class

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


class Model:
    """A model that notes its calls, and refuses some inputs."""

    name, version = "m", 1

    def __init__(self, folder: pathlib.Path) -> None:
        examples = (TensorSpec("inputs", "string", (None,)),)
        self.folder, self.calls = folder, list[tuple[str, Any]]()
        numbers = (TensorSpec("x", "float32", (None, 2)),)
        self.signatures = {
            DEFAULT: Signature(numbers, numbers, PREDICT),
            "classes": Signature(examples, (TensorSpec("scores", "float32", (None, 2)),), CLASSIFY),
            "values": Signature(examples, (TensorSpec("outputs", "float32", (None,)),), REGRESS),
        }

    def has_rows_apart(self, signature: str) -> bool:
        return signature == DEFAULT

    def run(self, inputs: Any, signature: str) -> Any:
        (array,) = inputs.values()
        self.calls.append((signature, array.tolist()))
        if -1 in array.ravel().tolist():
            raise ValueError("a row of -1")
        name = self.signatures[signature].outputs[0].name
        return {name: np.zeros((len(array), 2) if name == "scores" else len(array), np.float32)}


def field(number: int, content: bytes) -> bytes:
    """A field of bytes of fewer than 16,384."""
    length = len(content)
    return bytes([number << 3 | 2, length & 0x7F | 0x80, length >> 7]) + content


def predict(rows: Any) -> bytes:
    request = message_class("PredictRequest")()
    request.inputs["x"] = tf.make_tensor_proto(rows).SerializeToString()
    return field(6, field(1, request.SerializeToString()) + field(2, b""))


def examples(number: int, kind: str, signature: str) -> bytes:
    request = message_class(kind)()
    request.model_spec.signature_name = signature
    request.input.example_list.examples.append(b"")
    return field(number, field(1, request.SerializeToString()))


def multi_inference() -> bytes:
    request = message_class("MultiInferenceRequest")()
    for name, method in (("classes", CLASSIFY), ("values", REGRESS)):
        request.tasks.add(method_name=method).model_spec.signature_name = name
    request.input.example_list.examples.append(b"")
    return field(4, field(1, request.SerializeToString()))


def write(folder: pathlib.Path, records: list[bytes]) -> None:
    (folder / "assets.extra").mkdir()
    with tf.io.TFRecordWriter(str(folder / warm_up.REQUESTS)) as writer:
        for record in records:
            writer.write(record)


def test_numbers_of_rows() -> None:
    assert warm_up.sizes(1) == [1]
    assert warm_up.sizes(32) == [1, 2, 4, 8, 16, 32]
    assert warm_up.sizes(5) == [1, 2, 4, 5]


def test_made_up_rows(tmp_path: pathlib.Path) -> None:
    model = Model(tmp_path)
    warm_up.warm_up(model, 4, 1000)
    assert [(name, len(rows)) for name, rows in model.calls] == [
        *((DEFAULT, 1), (DEFAULT, 2), (DEFAULT, 4)),
        *(("classes", 1), ("values", 1)),
    ]


def test_requests_of_the_model_are_replayed(tmp_path: pathlib.Path) -> None:
    model = Model(tmp_path)
    kinds = [(2, "ClassificationRequest", "classes"), (3, "RegressionRequest", "values")]
    write(tmp_path, [predict(ROWS), *(examples(*kind) for kind in kinds), multi_inference()])
    warm_up.warm_up(model, 1, 1000)
    assert model.calls[3:] == [
        (DEFAULT, ROWS.tolist()),
        *(("classes", [b""]), ("values", [b""])),
        *(("classes", [b""]), ("values", [b""])),
    ]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (predict(np.full((1, 2), -1, np.float32)), "a row of -1"),
        (predict(np.zeros((1, 3), np.float32)), "x"),
        (b"nonsense", "message"),
    ],
)
def test_a_request_that_fails_is_said(
    tmp_path: pathlib.Path, record: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(tmp_path)
    write(tmp_path, [predict(ROWS), record])
    with caplog.at_level(logging.WARNING, "nanotf"):
        warm_up.warm_up(model, 1, 1000)
    (line,) = caplog.messages
    assert line.startswith(f"m, version 1: record 2 of {warm_up.REQUESTS}") and said in line


def test_a_file_that_is_broken_is_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / warm_up.REQUESTS).write_bytes(b"no records" * 10)
    with caplog.at_level(logging.WARNING, "nanotf"):
        warm_up.warm_up(Model(tmp_path), 1, 1000)
    assert "cannot be replayed" in caplog.text
