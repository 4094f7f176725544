"""Engines of optional packages compute what Keras does, or say that they cannot."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from inference_models import (
    MODELS,
    assert_equal,
    check_batches,
    keras_result,
    model_and_rows,
)

from nanotf import errors, inference
from nanotf.errors import ConversionError
from nanotf.inference.engines import engine_table
from nanotf.inference.signature import DEFAULT

L = tf.keras.layers
ENGINES = ("openvino", "onnxruntime", "litert")
# They know no text; LiteRT knows no recurrent layers.
UNABLE = {(engine, "text") for engine in ENGINES} | {("litert", "lstm")}
ROUNDS = {("openvino", "ids")}  # see `test_large_integers`


def _require(engine: str, precision: str = "f32") -> None:
    try:
        engine_table.check_engine(engine, precision)
    except errors.UnsupportedVersionError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def _threads_of_engines() -> None:
    """Makes OpenVINO start its threads, which live as long as the process."""
    with contextlib.suppress(errors.UnsupportedVersionError):
        inference.make(model_and_rows("dense")[0], "openvino")


@pytest.mark.both_generations
@pytest.mark.parametrize(
    ("engine", "kind"), [(e, k) for e in ENGINES for k in MODELS if (e, k) not in UNABLE | ROUNDS]
)
def test_same_as_keras(engine: str, kind: str, tmp_path: pathlib.Path) -> None:
    _require(engine)
    model, rows = model_and_rows(kind)
    program = inference.make(model, engine, threads=1)
    check_batches(program, model, rows)
    program.save(tmp_path / "program")
    again = inference.load(tmp_path / "program")
    assert again.engine == engine
    x = rows(3)
    assert_equal(again(x), keras_result(model, x))


@pytest.mark.parametrize(("engine", "kind"), sorted(UNABLE))
def test_models_that_an_engine_does_not_take(engine: str, kind: str) -> None:
    _require(engine)
    with pytest.raises(ConversionError, match=f"The engine '{engine}' must be able to convert"):
        inference.make(model_and_rows(kind)[0], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_predict_on_workers(engine: str) -> None:
    _require(engine)
    model, rows = model_and_rows("several")
    program, x = inference.make(model, engine), rows(101)
    expected = keras_result(model, x)
    assert_equal(program.predict(x, batch_size=8), expected)
    assert_equal(program.predict(x, batch_size=8, num_processes=2), expected)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        (engine.name, precision)
        for engine in engine_table.ENGINES.values()
        for precision in engine.precisions[1:]
    ],
)
def test_lower_precisions_are_near(engine: str, precision: str, tmp_path: pathlib.Path) -> None:
    """They differ, and by less than a fifth of the largest result."""
    _require(engine, precision)
    model, rows = model_and_rows("conv")
    x = rows(64)
    program = inference.make(model, engine, precision, rows=x, folder=tmp_path / "program")
    assert program.precision == inference.load(program.folder).precision == precision
    expected = keras_result(model, x)
    assert np.abs(program(x) - expected).max() < 0.2 * np.abs(expected).max()


def test_onnx_that_is_invalid_is_no_program() -> None:
    """Keras writes the exact gelu as an operation that ONNX lacks, without a word."""
    _require("onnxruntime")
    model = tf.keras.Sequential([L.Input((8,)), L.Dense(8, "gelu"), L.Dense(2)])
    x = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
    try:
        program = inference.make(model, "onnxruntime")
    except ConversionError as error:
        assert "onnxruntime" in str(error)
    else:
        assert_equal(program(x), model.predict(x, verbose=0))


def test_large_integers() -> None:
    """OpenVINO would round them."""
    _require("openvino")
    ids = L.Input((3,), dtype="int64", name="ids")
    doubled: Any = L.Add()([ids, ids])
    program = inference.make(tf.keras.Model(ids, doubled), "openvino")
    x = np.full((2, 3), 2**23, "int64")
    assert_equal(program(x), 2 * x)
    with pytest.raises(errors.InvalidArgumentError, match=r"up to 2\*\*24 only"):
        program(2 * x + 1)


def test_threads_and_names() -> None:
    for engine in ENGINES:
        _require(engine)
        program = inference.make(model_and_rows("several")[0], engine, threads=1)
        assert program.threads == 1
        signature = program.signatures[DEFAULT]
        assert signature.input_names == ("b", "a")
        assert [spec.name for spec in signature.outputs] == ["q", "p"]
