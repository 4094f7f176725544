"""`evaluate(num_processes=2)` returns the numbers of `evaluate()`, and changes nothing else."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import digits, optimizer_state, small_cnn, weights

from nanotf import errors
from nanotf.keras import Model, Sequential

L = tf.keras.layers


def _metric_state(model: Any) -> list[np.ndarray]:
    return [np.asarray(v) for metric in model.metrics for v in metric.variables]


def _evaluate_both(
    make: Any, *arguments: Any, rtol: float = 1e-10, **named: Any
) -> tuple[Any, Any]:
    """Evaluates two equal models, with two processes and with one; they must agree."""
    named = {"verbose": 0, **named}
    found, expected = make(), make()
    theirs = expected.evaluate(*arguments, **named)
    before = found.get_weights()
    ours = found.evaluate(*arguments, **named, num_processes=2)
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert [type(v) for v in ours.values()] == [type(v) for v in theirs.values()]
        ours, theirs = list(ours.values()), list(theirs.values())
    np.testing.assert_allclose(ours, theirs, rtol=rtol)
    for now, then in zip(found.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert len(optimizer_state(found)) == len(optimizer_state(expected))
    for mine, other in zip(_metric_state(found), _metric_state(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol)
    return found, expected


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize(("rows", "batch_size"), [(200, 50), (201, 50), (3, 1), (70, None)])
@pytest.mark.both_generations
def test_arrays(float64: None, rows: int, batch_size: int | None, return_dict: bool) -> None:
    x, y = digits(rows)
    _evaluate_both(small_cnn, x, y, batch_size, return_dict=return_dict)


@pytest.mark.thorough
@pytest.mark.both_generations
def test_dataset_and_steps(float64: None) -> None:
    x, y = digits(201)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(50)
    _evaluate_both(small_cnn, data)
    _evaluate_both(small_cnn, data, steps=3)
    _evaluate_both(small_cnn, data.repeat(), steps=7)
    _evaluate_both(small_cnn, x, y, batch_size=50, steps=2)
    _evaluate_both(small_cnn, data.filter(lambda x, y: True))  # of unknown length


@pytest.mark.thorough
def test_sample_weight(float64: None) -> None:
    x, y = digits(201)
    w = weights(201)
    w[:30] = 0
    _evaluate_both(lambda: small_cnn(weighted=True), x, y, 50, sample_weight=w)


def test_loss_alone_is_a_number(float64: None) -> None:
    def model() -> Any:
        tf.keras.utils.set_random_seed(2)
        made = Sequential([L.Input((4,)), L.Dense(1)])
        made.compile(loss="mse")
        return made

    rng = np.random.default_rng(0)
    _evaluate_both(model, rng.random((21, 4)), rng.random((21, 1)), 5)


def _two_outputs() -> Any:
    tf.keras.utils.set_random_seed(5)
    inputs = L.Input((8, 8, 1))
    flat = L.Flatten()(inputs)
    digit = L.Dense(10, activation="softmax", name="digit")(flat)
    odd = L.Dense(1, activation="sigmoid", name="odd")(flat)
    model = Model(inputs, {"digit": digit, "odd": odd})
    model.compile(
        "adam",
        loss={"digit": "sparse_categorical_crossentropy", "odd": "binary_crossentropy"},
        loss_weights={"digit": 1.0, "odd": 0.3},
        metrics={
            "digit": ["accuracy"],
            "odd": [
                tf.keras.metrics.AUC(num_thresholds=31, name="auc"),
                tf.keras.metrics.BinaryIoU(name="iou"),
                tf.keras.metrics.Precision(name="precision"),
            ],
        },
    )
    return model


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.both_generations
def test_two_outputs_with_stateful_metrics(float64: None, return_dict: bool) -> None:
    x, y = digits(151)
    targets = {"digit": y, "odd": (y % 2).astype("float64")[:, None]}
    _evaluate_both(_two_outputs, x, targets, 50, return_dict=return_dict)


def _with_f1() -> Any:
    tf.keras.utils.set_random_seed(5)
    model = Sequential([L.Input((8, 8, 1)), L.Flatten(), L.Dense(10, activation="softmax")])
    f1 = tf.keras.metrics.F1Score(average="macro")
    model.compile("sgd", "categorical_crossentropy", metrics=[f1])
    return model


@pytest.mark.both_generations
def test_metric_built_by_its_first_batch() -> None:
    # In float32, since Keras 2's F1Score supports no other type.
    x, y = digits(101)
    _evaluate_both(_with_f1, x, tf.keras.utils.to_categorical(y, 10), 50, rtol=1e-5)


@pytest.mark.thorough
def test_one_model_with_all_sizes_before_and_after_fit(float64: None) -> None:
    """Functions traced for one call must also work in the next."""
    x, y = digits(201)
    found, expected = (small_cnn(tf.keras.optimizers.Adam(0.01)) for _ in range(2))
    for rows in (200, 201, 3, 200):
        arrays = {"x": x[:rows], "y": y[:rows], "batch_size": 50, "verbose": 0}
        np.testing.assert_allclose(
            found.evaluate(**arrays, num_processes=2), expected.evaluate(**arrays), rtol=1e-10
        )
        arrays["shuffle"] = False
        ours = found.fit(**arrays, num_processes=2).history
        theirs = expected.fit(**arrays).history
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-10)


def test_optimizer_is_not_built_by_evaluate() -> None:
    x, y = digits(20)
    model = small_cnn(tf.keras.optimizers.Adam(0.01))
    before = len(optimizer_state(model))
    model.evaluate(x, y, verbose=0, num_processes=2)
    assert len(optimizer_state(model)) == before


class _Recorder(tf.keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def _note(self, hook: str, index: Any, logs: Any) -> None:
        self.calls.append((hook, index, tuple(sorted(logs or {})), os.getpid()))

    def on_test_begin(self, logs: Any = None) -> None:
        self._note("begin", None, logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._note("end", tuple(np.round(list(logs.values()), 5)), logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note("batch begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("batch end", batch, logs)


@pytest.mark.both_generations
def test_callbacks_run_here_in_keras_order() -> None:
    x, y = digits(120)
    calls = []
    for processes in (None, 2):
        recorder = _Recorder()
        model = small_cnn()
        model.evaluate(x, y, 50, verbose=0, callbacks=[recorder], num_processes=processes)
        assert recorder.model is model
        calls.append(recorder.calls)
    assert calls[1] == calls[0]


@pytest.mark.skipif(
    not hasattr(tf.keras.callbacks, "SwapEMAWeights"), reason="Keras 3 alone has stop_evaluating"
)
def test_callback_that_ends_the_evaluation() -> None:
    class Stop(tf.keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.stop_evaluating = True

    x, y = digits(200)
    values = [
        small_cnn().evaluate(x, y, 50, verbose=0, callbacks=[Stop()], num_processes=processes)
        for processes in (None, 2)
    ]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-4)


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
@pytest.mark.parametrize("source", ["arrays", "dataset"])
def test_progress_is_printed_once(
    capfd: pytest.CaptureFixture[str], verbose: Any, source: str
) -> None:
    x, y = digits(200)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(50).filter(lambda x, y: True)
    arguments = (x, y, 50) if source == "arrays" else (data,)
    shown = []
    for processes in (None, 2):
        model = small_cnn()
        capfd.readouterr()
        model.evaluate(*arguments, verbose=verbose, num_processes=processes)
        out = re.sub(r"\x1b\[[0-9;]*m|\x08", "", capfd.readouterr().out)
        shown.append(
            (re.findall(r"4/4", out)[-1:], re.findall(r"(?:accuracy|loss): [\d.e-]{5}", out)[-2:])
        )
    assert shown[1] == shown[0]
    assert bool(shown[1][1]) == (verbose != 0)


def test_inside_a_callback_of_fit() -> None:
    x, y = digits(100)
    model = small_cnn()

    def look(epoch: int, logs: Any) -> None:
        model.evaluate(x, y, verbose=0, num_processes=2)

    callback = tf.keras.callbacks.LambdaCallback(on_epoch_end=look)
    with pytest.raises(errors.NanoError, match=r"evaluate\(num_processes=2\).*Leave num_pro"):
        model.fit(x, y, verbose=0, callbacks=[callback], num_processes=2)
    model.evaluate(x, y, verbose=0, num_processes=2)


def _times_said(caplog: pytest.LogCaptureFixture, call: Callable[[], Any]) -> int:
    """Counts Keras's reports that the data ran out: a warning, or a line in TensorFlow's log."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    text = caplog.text + "".join(str(w.message) for w in caught)
    return text.count("Your input ran out of data")


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
@pytest.mark.parametrize("steps", [3, 4])
def test_reports_that_data_ran_out(
    method: str, kind: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = digits(60)
    data: Any = (x, y) if method == "evaluate" else (x,)
    arguments: dict[str, Any] = {"steps": steps, "batch_size": 20, "verbose": 0}
    if kind == "dataset":
        data = (tf.data.Dataset.from_tensor_slices(data).batch(20),)
        del arguments["batch_size"]
    said = [
        _times_said(caplog, lambda n=n: getattr(small_cnn(), method)(*data, **arguments, **n))  # type: ignore[misc]
        for n in ({}, {"num_processes": 2})
    ]
    assert said[1] == said[0]
    assert said[0] == (steps == 4)


class Counts(L.Layer):  # type: ignore[misc]
    """A layer that counts rows whenever it is called."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")

    def call(self, x: Any) -> Any:
        self.rows.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 0.0, self.rows.dtype)))
        return x


@pytest.mark.both_generations
@pytest.mark.parametrize("rows", [44, 40])
def test_variables_that_a_layer_assigns(rows: int) -> None:
    """They come back from `evaluate` and `predict`, as from `fit`."""
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    found = []
    for options in ({}, {"num_processes": 2}):
        layer = Counts()
        model = Sequential([L.Input((8,)), layer, L.Dense(2)])
        model.compile("sgd", "mse")
        given = {"batch_size": 8, "verbose": 0, **options}
        model.evaluate(x, x[:, :2], **given)
        after = [float(layer.rows.numpy())]
        model.predict(x, **given)
        after.append(float(layer.rows.numpy()))
        model.fit(x, x[:, :2], **given)
        found.append([*after, float(layer.rows.numpy())])
    assert found[1] == found[0]
    assert found[0][0] > 0.0
