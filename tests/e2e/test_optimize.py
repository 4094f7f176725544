"""`optimize` finds the fastest engine that computes what Keras does; none ends the search."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import failing_engines
import inference_models
import numpy as np
import pytest
import tensorflow as tf
from inference_models import assert_equal, keras_result, model_and_rows

from nanotf import errors, inference
from nanotf.inference import optimize_result
from nanotf.inference.engines import engine_table

L = tf.keras.layers


@pytest.fixture(autouse=True)
def _no_result_stays() -> Iterator[None]:
    """Deletes the folders of results that exceptions of `pytest.raises` refer to in circles."""
    yield
    gc.collect()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds engines that go wrong."""
    for kind in vars(failing_engines).values():
        if isinstance(kind, type) and issubclass(kind, failing_engines.FailingEngine):
            monkeypatch.setitem(engine_table.ENGINES, kind.name, kind())


def tried(result: Any) -> dict[str, Any]:
    return {each.name: each for each in result.candidates}


@pytest.mark.both_generations
@pytest.mark.parametrize("kind", ["several", "dense", "dicts", "lstm", "text", "subclassed"])
def test_models_of_all_kinds(kind: str, tmp_path: pathlib.Path) -> None:
    """The best program takes and returns what the model does, here and after it was saved."""
    model, rows = model_and_rows(kind)
    x = rows(9)
    result = inference.optimize(
        model, x, engines=("tensorflow", "frozen"), batch_sizes=(1, 4), verbose=0
    )
    # Tables of texts cannot be frozen.
    statuses = ["ok", "failed" if kind == "text" else "ok"]
    assert [each.status for each in result.candidates] == statuses, str(result)
    for each in result.candidates[: statuses.count("ok")]:
        assert set(each.milliseconds) == {1, 4}
        assert each.relative_difference is not None and each.relative_difference < 1e-5
        assert each.megabytes is not None and each.megabytes > 0
    assert_equal(result.best()(x), keras_result(model, x))
    result.save(tmp_path / "best", batch_size=4)
    assert_equal(inference.load(tmp_path / "best")(x), keras_result(model, x))


@pytest.mark.usefixtures("engines")
def test_engines_that_go_wrong() -> None:
    """Crashes, errors, wrong results and absent packages are told apart, and end no search."""
    model, rows = model_and_rows("dense")
    names = ("aborting", "absent", "raising", "wrong", "wrong_in_batches", "aborting_later")
    result = inference.optimize(
        model, rows(8), engines=(*names, "tensorflow"), batch_sizes=(1, 3), verbose=0
    )
    found = tried(result)
    status = {each.engine: each.status for each in result.candidates}
    assert status == {
        "tensorflow": "ok",
        "aborting": "crashed",
        "aborting_later": "crashed",
        "raising": "failed",
        "wrong": "differs",
        "wrong_in_batches": "differs",
        "absent": "not installed",
    }
    assert "SIGABRT" in found["aborting f32"].reason
    assert found["raising f32"].reason == "no rule for TensorList"
    assert found["absent f32"].reason == "pip install 'nanotf[absent]'"
    assert found["wrong f32"].relative_difference == pytest.approx(0.01, rel=0.1)
    assert found["wrong_in_batches f32"].relative_difference == np.inf
    assert isinstance(found["aborting f32"].error, errors.WorkerDied)
    assert result.best().engine == "tensorflow"
    text = str(result)
    for each in result.candidates:
        assert each.status in text and each.reason in text
    with pytest.raises(errors.InvalidArgumentError, match="wrong f32, which is differs: by 1"):
        result.program("wrong")
    with pytest.raises(errors.UnavailableError, match="aborting f32: crashed: "):
        result.best(engine="aborting")


@pytest.mark.usefixtures("engines")
def test_an_engine_that_comes_to_no_end() -> None:
    """A process that takes longer than `seconds` is ended; that it was too slow is told."""
    model, rows = model_and_rows("dense")
    result = inference.optimize(model, rows(2), engines=("hanging",), seconds=1, verbose=0)
    (found,) = result.candidates
    assert (found.status, found.reason) == ("too slow", "it took longer than 1 s")
    with pytest.raises(errors.UnavailableError, match="hanging f32: too slow"):
        result.best()


def accuracy(y: Any, outputs: Any) -> float:
    return float(np.mean(np.argmax(outputs, 1) == y))


@pytest.mark.usefixtures("engines")
def test_lower_precisions() -> None:
    """bf16 and int8 are tried if asked for, and judged by the metric."""
    model, rows = model_and_rows("dense")
    x = rows(64)
    y = np.argmax(model.predict(x, verbose=0), 1)
    y[:3] = (y[:3] + 1) % 3  # Keras itself is not always right
    options: dict[str, Any] = {"engines": ("rounding",), "batch_sizes": (2,), "verbose": 0}
    result = inference.optimize(model, x, precisions=("f32", "bf16"), **options)
    assert [each.status for each in result.candidates] == ["ok", "differs"]
    result = inference.optimize(
        model,
        x,
        precisions=("f32", "bf16", "int8"),
        metric=accuracy,
        y=y,
        metric_loss=0.2,
        **options,
    )
    found = tried(result)
    assert result.metric == pytest.approx(61 / 64)
    assert [each.status for each in result.candidates] == ["ok", "ok", "worse"]
    assert found["rounding f32"].metric == result.metric
    assert found["rounding int8"].reason.endswith("that of Keras 0.9531")
    assert result.best(precision="bf16").precision == "bf16"
    assert result.best(metric_loss=0.0, max_difference=1e-6).precision == "f32"
    with pytest.raises(errors.InvalidArgumentError, match="Pass `metric` and `y`"):
        inference.optimize(model, x, precisions=("int8",), **options)


def test_a_saved_model_and_a_keras_file(tmp_path: pathlib.Path) -> None:
    model, rows = model_and_rows("dense")
    x = rows(5)
    model.save(tmp_path / "model.keras")
    inference.make(model, folder=tmp_path / "program")
    tf.saved_model.save(Doubled(), str(tmp_path / "saved"))
    options: dict[str, Any] = {"engines": ("tensorflow",), "batch_sizes": (1,), "verbose": 0}
    result = inference.optimize(tmp_path / "model.keras", x, **options)
    assert_equal(result.best()(x), keras_result(model, x))
    result = inference.optimize(tmp_path / "saved", x, **options)
    np.testing.assert_array_equal(result.best()(x)["output_0"], x * 2)


class Doubled(tf.Module):
    """A module that serves a function."""

    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32, "x")])
    def serve(self, x: Any) -> Any:
        return x * 2.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engines": "frozen"}, "`engines` must be a sequence of names"),
        ({"engines": ("frost",)}, "`engines` must be one of 'tensorflow', 'frozen'"),
        ({"precisions": ("f16",)}, "`precisions` must be one of 'f32', 'bf16', 'int8'"),
        ({"engines": ("xla",), "precisions": ("bf16",)}, "At least one of the engines must have"),
        ({"batch_sizes": ()}, "`batch_sizes` must have an element"),
        ({"batch_sizes": 4}, "`batch_sizes` must be a sequence of numbers"),
        ({"batch_sizes": (0,)}, "`batch_sizes` must be"),
        ({"threads": 0}, "`threads` must be"),
        ({"tolerance": -1}, "`tolerance` must be a number of at least 0"),
        ({"tolerance": float("inf")}, "`tolerance` must be a number of at least 0"),
        ({"metric_loss": -0.1}, "`metric_loss` must be a number of at least 0"),
        ({"metric_loss": float("nan")}, "`metric_loss` must be a number of at least 0"),
        ({"seconds": 0}, "`seconds` must be a number above 0"),
        ({"metric": accuracy}, "`metric` and `y` belong together"),
        ({"metric": 3, "y": 1}, "`metric` must be a function"),
        ({"verbose": 7}, "`verbose` must be one of"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], text: str) -> None:
    """They are refused before anything starts."""
    with pytest.raises(errors.NanoError, match=text):
        inference.optimize(None, None, **options)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((3, 9), "float32"), "must have the shape"),
        (np.zeros((0, 8), "float32"), "`x` the same number for each input, at least 1"),
    ],
)
def test_rows_that_do_not_fit(x: Any, text: str) -> None:
    model, _ = model_and_rows("dense")
    with pytest.raises(errors.InvalidArgumentError, match=text):
        inference.optimize(model, x, engines=("tensorflow",), verbose=0)


def test_programs_keep_their_folder() -> None:
    """A program still computes on workers after the result was dropped, and then leaves nothing."""
    model, rows = model_and_rows("dense")
    x = rows(6)
    expected = keras_result(model, x)  # first: AutoGraph keeps what callers' frames hold then
    program = inference.optimize(
        model, x, engines=("tensorflow",), batch_sizes=(2,), verbose=0
    ).best()
    assert_equal(program.predict(x, batch_size=2, num_processes=1), expected)
    folder = program.folder
    assert folder.is_dir()
    del program
    assert not folder.exists()


def test_a_tie_goes_to_the_simpler_engine() -> None:
    """Times within 5 % are noise; a table shows what is not known as a dash."""
    result = result_of({"tensorflow": 1.04, "frozen": 1.0, "xla": 2.0})
    assert result.best_candidate().engine == "tensorflow"
    result = result_of({"tensorflow": 1.06, "frozen": 1.0, "xla": 2.0})
    assert result.best_candidate().engine == "frozen"
    with pytest.raises(errors.InvalidArgumentError, match="must be one of those measured"):
        result.best_candidate(batch_size=2)
    with pytest.raises(errors.InvalidArgumentError, match="`metric_loss` needs a metric"):
        result.best_candidate(metric_loss=0.1)


def result_of(times: dict[str, float]) -> Any:
    import tempfile

    from nanotf.inference.optimize_arguments import SearchOptions

    candidates = [
        optimize_result.Candidate(
            name, "f32", "ok", milliseconds={1: time, 8: 2 * time}, relative_difference=0.0
        )
        for name, time in times.items()
    ]
    folder = tempfile.TemporaryDirectory()
    return optimize_result.OptimizeResult(
        candidates, folder, SearchOptions(batch_sizes=(1, 8)), None
    )


def test_rows_that_meet(tmp_path: pathlib.Path) -> None:
    """The outputs to compare with are those of the measured batches, not of other ones."""
    tf.saved_model.save(inference_models.Centring(), str(tmp_path / "saved"))
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    result = inference.optimize(
        tmp_path / "saved", x, engines=("tensorflow", "xla"), batch_sizes=(1, 3), verbose=0
    )
    assert [each.status for each in result.candidates] == ["ok", "ok"], str(result)
