"""`InferenceOptimizer` has the names of BigDL-Nano, and refuses what has no meaning here."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import failing_engines
import numpy as np
import pytest
import tensorflow as tf
from inference_models import assert_equal, keras_result, model_and_rows

from nanotf import errors
from nanotf.inference import InferenceOptimizer, nano_names
from nanotf.inference.engines import engine_table


@pytest.fixture(autouse=True, scope="module")
def _no_result_stays() -> Iterator[None]:
    """Deletes the folders of results that exceptions of `pytest.raises` refer to in circles."""
    yield
    gc.collect()


def test_optimize_and_best_model(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optimize, summary, the best model, save and load: the calls of BigDL-Nano's guide."""
    model, rows = model_and_rows("dense")
    x = rows(16)
    y = np.argmax(model.predict(x, verbose=0), 1)
    optimizer = InferenceOptimizer()
    with pytest.raises(errors.UnavailableError, match=r"Call optimize\(model, x\) first"):
        optimizer.summary()
    optimizer.optimize(
        model,
        x,
        y,
        batch_size=4,
        metric=tf.keras.metrics.SparseCategoricalAccuracy(),
        thread_num=1,
        includes=("original",),
        output_filename=tmp_path / "table.txt",
    )
    printed = capsys.readouterr().out
    assert "tensorflow" in printed and "Keras's own metric: 1" in printed
    assert (tmp_path / "table.txt").read_text() == printed
    assert optimizer.optimized_model_dict["original"].status == "ok"
    program, option = optimizer.get_best_model(accuracy_criterion={"relative": 0.01})
    assert option == "original"
    assert program.threads == 1
    assert_equal(program(x), keras_result(model, x))
    assert_equal(optimizer.get_model("original").predict(x), keras_result(model, x))
    InferenceOptimizer.save(program, tmp_path / "program")
    assert_equal(InferenceOptimizer.load(tmp_path / "program")(x), keras_result(model, x))
    with pytest.raises(errors.UnavailableError, match="The best is one of"):
        optimizer.get_best_model(accelerator="openvino")


def test_the_criterion_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods whose metric is worse are kept: the criterion says which of them may be returned."""
    engine = failing_engines.RoundingEngine()
    monkeypatch.setitem(engine_table.ENGINES, engine.name, engine)
    for name, precision in {"openvino_fp32": "f32", "openvino_int8": "int8"}.items():
        monkeypatch.setitem(nano_names.METHODS, name, (engine.name, precision))
    model, rows = model_and_rows("dense")
    x = rows(64)
    y = np.argmax(model.predict(x, verbose=0), 1)
    assert set(y) != {0}  # which the rounded outputs always tell
    optimizer = InferenceOptimizer()
    optimizer.optimize(
        model,
        x,
        y,
        metric=lambda y, outputs: float(np.mean(np.argmax(outputs, 1) == y)),
        thread_num=1,
        includes=("openvino_fp32", "openvino_int8"),
    )
    found = optimizer.optimized_model_dict
    assert found["openvino_int8"].metric < 0.9
    assert {each.status for each in found.values()} == {"ok"}
    program, _ = optimizer.get_best_model(precision="int8", accuracy_criterion=1.0)
    assert program.precision == "int8"
    with pytest.raises(errors.UnavailableError, match="within the limits"):
        optimizer.get_best_model(precision="int8", accuracy_criterion=0.1)
    program, _ = optimizer.get_best_model(accuracy_criterion={"relative": 0.1})
    assert program.precision == "f32"


def test_absent_packages_and_excludes(capsys: pytest.CaptureFixture[str]) -> None:
    """Methods in float32 are tried; those that are not installed or excluded end nothing."""
    model, rows = model_and_rows("dense")
    optimizer = InferenceOptimizer()
    optimizer.optimize(model, rows(4), excludes=("onnxruntime_fp32",), thread_num=1)
    assert list(optimizer.optimized_model_dict) == ["original", "openvino_fp32"]
    assert optimizer.optimized_model_dict["original"].status == "ok"
    assert optimizer.optimized_model_dict["openvino_fp32"].status in ("ok", "not installed")
    assert "openvino" in capsys.readouterr().out


def test_trace() -> None:
    model, rows = model_and_rows("several")
    x = rows(3)
    as_here = {"device": "CPU", "logging": False, "approach": "static", "conf": None}
    program = InferenceOptimizer.trace(model, thread_num=1, **as_here)
    assert program.engine == "tensorflow"
    assert_equal(program(x), keras_result(model, x))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda o, m, x: o.optimize(m, x, latency_sample_num=5), "`latency_sample_num` of BigDL"),
        (lambda o, m, x: o.optimize(m, x, direction="up"), "`direction` must be one of"),
        (lambda o, m, x: o.optimize(m, x, includes=["static_int8"]), "must be one of 'original'"),
        (lambda o, m, x: o.optimize(m, x, includes=["openvino_int8"]), "Pass `metric` and `y`"),
        (lambda o, m, x: o.optimize(m, x, validation_data=x), "must be a pair of rows and labels"),
        (lambda o, m, x: o.get_best_model(use_ipex=True), "`use_ipex` of BigDL-Nano has no"),
        (lambda o, m, x: o.get_best_model(precision="fp16"), "`precision` must be one of 'fp32'"),
        (lambda o, m, x: o.get_best_model(accuracy_criterion={"a": 1}), "the key 'relative'"),
        (lambda o, m, x: o.trace(m, "tensorrt"), "`accelerator` must be one of 'openvino'"),
        (lambda o, m, x: o.trace(m, device="GPU"), "nanotf computes on CPUs"),
        (lambda o, m, x: o.trace(m, logging=True), "Conversions show nothing"),
        (lambda o, m, x: o.quantize(m, x, max_trials=3), "There is no tuning"),
        (lambda o, m, x: o.quantize(m, x, y=np.array([0, 1])), "Rows calibrate, labels do not"),
        (lambda o, m, x: o.quantize(m, x, batch="CPU"), "Rows calibrate one by one"),
        (lambda o, m, x: o.quantize(m, x), "Pass 'openvino' or 'onnxruntime'"),
        (lambda o, m, x: o.save(m, "here"), "`model` must be a program"),
        (lambda o, m, x: o.load("nowhere"), "which is not there"),
    ],
)
def test_arguments_without_a_meaning(call: Any, text: str) -> None:
    model, rows = model_and_rows("dense")
    with pytest.raises(errors.NanoError, match=text):
        call(InferenceOptimizer(), model, rows(2))
    with pytest.raises(TypeError, match="unexpected argument 'acelerator'"):
        InferenceOptimizer.trace(model, acelerator="openvino")
