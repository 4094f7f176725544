"""Methods that a user's model class overrides run in the user's process, as often as alone."""

from __future__ import annotations

import collections
import functools
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

import nanotf
from nanotf.compat import keras_models
from nanotf.keras import Model
from nanotf.parent import defaults

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
ROWS, BATCH = 41, 10
FIT = {"batch_size": BATCH, "epochs": 2, "verbose": 0}


class Network:
    """The layers of a small model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = L.Dense(4, activation="tanh")
        self.drop = L.Dropout(0.2, seed=3)
        self.out = L.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.hidden(x), training=training))


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.normal(size=(ROWS, 3)), random.normal(size=(ROWS, 1))


def compiled(cls: Any) -> Any:
    tf.keras.utils.set_random_seed(1)
    model = cls()
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


class Plain(Network, Model):
    """The model from which the tests derive."""


class Longer(Plain):
    """Trains for twice the epochs, in another signature."""

    def fit(self, rows: Any, labels: Any, *, times: int = 1, **kwargs: Any) -> Any:
        epochs = kwargs.pop("epochs")
        return super().fit(rows, labels, epochs=(times + 1) * epochs, **kwargs)


class Tokenizing(Plain):
    """Prepares its data in each of its methods."""

    def fit(self, x: Any, y: Any, **kwargs: Any) -> Any:
        return super().fit(x * 2, y, **kwargs)

    def evaluate(self, x: Any, y: Any, **kwargs: Any) -> Any:
        return super().evaluate(x * 2, y, **kwargs)

    def predict(self, x: Any, **kwargs: Any) -> Any:
        return super().predict(x * 2, **kwargs)


class Twice(Plain):
    """Trains twice, and changes a weight between."""

    def fit(self, x: Any, y: Any, **kwargs: Any) -> Any:
        first = super().fit(x, y, **kwargs)
        self.out.bias.assign_add([0.5])
        second = super().fit(x[::2], y[::2], **kwargs)
        second.history["first"] = first.history["loss"]
        return second


class OwnEvaluation(Plain):
    """Evaluates on noisy data twice, and changes its weights and its logs."""

    calls = 0

    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        first = super().evaluate(x, y, **kwargs)
        self.out.bias.assign_add([0.01])
        second = super().evaluate(x, y, **kwargs)
        if not isinstance(first, dict):
            return second
        return {"calls": float(self.calls), "before": first["loss"], **second}


KINDS = {cls.__name__: cls for cls in (Longer, Tokenizing, Twice, OwnEvaluation)}


def on_data(model: Any, **more: Any) -> Any:
    x, y = data()
    return model.fit(x, y, **FIT, **more)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every_case
def test_own_methods(name: str, float64: None) -> None:
    models, results = [], []
    for more in ({}, {"num_processes": 2}):
        model = compiled(KINDS[name])
        x, y = data()
        history = on_data(model, **more).history
        results.append((history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)))
        models.append(model)
    (alone, loss, outputs), (history, found, theirs) = results
    assert_same_history(history, alone)
    assert_same_state(models[1], models[0])
    np.testing.assert_allclose(found, loss, rtol=1e-10)
    np.testing.assert_allclose(theirs, outputs, rtol=1e-10)


@pytest.mark.parametrize(
    "arguments",
    [
        {"validation_split": 0.3},
        pytest.param(
            {"validation_split": 0.3, "validation_freq": 2, "validation_batch_size": 7},
            marks=pytest.mark.thorough,
        ),
        {"validation_data": True},
    ],
    ids=["split", "freq", "data"],
)
@pytest.mark.every_case
def test_validation_by_an_own_evaluate(arguments: dict[str, Any], float64: None) -> None:
    """`fit` calls it in this process, and continues with what it left in the model."""
    if "validation_data" in arguments:
        dataset = tf.data.Dataset.from_tensor_slices(data()).batch(9)
        arguments = {"validation_data": dataset, "validation_steps": 3}
    models, histories = [], []
    for more in ({}, {"num_processes": 2}):
        model = compiled(OwnEvaluation)
        histories.append([on_data(model, **arguments, **more).history for _ in range(2)])
        models.append(model)
        assert model.calls == (2 if "validation_freq" in arguments else 4)
    for found, alone in zip(*reversed(histories), strict=True):
        assert {"val_loss", "val_calls", "val_before"} <= alone.keys()
        assert_same_history(found, alone)
    assert_same_state(models[1], models[0])


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param({}, marks=pytest.mark.thorough, id="alone"),
        pytest.param({"num_processes": 2}, id="workers"),
    ],
)
@pytest.mark.every_case
def test_validation_of_a_resumable_fit(
    workers: dict[str, int], float64: None, tmp_path: pathlib.Path
) -> None:
    """`resume` prepares the data itself, and must not leave the own validation out."""
    histories = []
    for more in ({}, {"resume": tmp_path, **workers}):
        model = compiled(OwnEvaluation)
        model.drop.rate = 0.0  # Keras 2's dropout has no state that a checkpoint can hold
        x, y = data()
        fit = {**FIT, "shuffle": False, "validation_split": 0.3}
        histories.append(model.fit(x, y, **fit, **more).history)
    assert "val_calls" in histories[0]
    assert_same_history(histories[1], histories[0])


def test_a_wrong_frequency_is_refused_before_the_workers_begin() -> None:
    model = compiled(OwnEvaluation)
    on_data(model, num_processes=2)
    workers = nanotf.worker_pids()
    with pytest.raises(ValueError, match="validation_freq"):
        on_data(model, validation_split=0.3, validation_freq="often", num_processes=2)
    assert nanotf.worker_pids() == workers


def test_a_validation_that_raises(float64: None) -> None:
    class Raising(Plain):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            if self.history.epoch:
                raise KeyError("second epoch")
            return super().evaluate(*args, **kwargs)

    models = []
    for more in ({}, {"num_processes": 2}):
        model = compiled(Raising)
        with pytest.raises(KeyError, match="second epoch"):
            on_data(model, validation_split=0.3, **more)
        assert model.history.epoch == [0]
        models.append(model)
    assert_same_state(models[1], models[0])


class Library(Network, keras_models.model_class()):  # type: ignore[misc]
    """A class of a library that derives from Keras's own `Model`, and has its own signature."""

    def fit(self, pairs: Any, *, times: int) -> Any:
        return super().fit(*pairs, batch_size=BATCH, epochs=2 * times, verbose=0)


def test_a_class_from_before_the_patch(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled(Library)
    alone = expected.fit(data(), times=2).history
    nanotf.patch_tensorflow()
    try:
        told = compiled(Library)
        histories = [told.fit(data(), times=2, num_processes=2)]
        monkeypatch.setattr(defaults, "current", defaults.RunDefault(2))
        found = compiled(Library)
        histories.append(found.fit(data(), times=2))
    finally:
        nanotf.unpatch_tensorflow()
    for model, history in zip((told, found), histories, strict=True):
        assert history.nanotf.size == 2
        assert_same_history(history.history, alone)
        assert_same_state(model, expected)


class Stacked(Library):
    """Trains another model first."""

    def fit(self, pairs: Any, *, times: int) -> Any:
        self.before = on_data(compiled(Plain))
        return super().fit(pairs, times=times)


def test_arguments_reach_the_model_that_they_were_given_to(float64: None) -> None:
    """`Stacked.fit` does not take `num_processes`; nanotf passes it beneath, and nowhere else."""
    model = nanotf.accelerate(compiled(Stacked))
    history = model.fit(data(), times=1, num_processes=2)
    assert (model.before.nanotf.size, history.nanotf.size) == (1, 2)


# Keras calls them while it traces a step, which a worker does once and Keras up to three times.
TRACED = {
    "add_loss", "add_metric", "call", "compute_loss", "compute_mask", "compute_metrics",
    "compute_output_shape", "compute_output_signature", "compute_output_spec", "get_metrics_result",
    "predict_step", "symbolic_call", "test_step", "train_step",
}  # fmt: skip
# Each process makes the functions that it runs.
MAKERS = {"make_predict_function", "make_test_function", "make_train_function"}


def public_methods() -> list[str]:
    found = inspect.getmembers(keras_models.model_class(), inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_") and name not in TRACED | MAKERS]


def telling_class() -> Any:
    """Returns a class that overrides all public methods, and says when one is called."""

    def override(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(Plain, name))  # Keras looks at the signature of `build`
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            print(f"called {name}")
            return getattr(super(cls, self), name)(*args, **kwargs)

        return method

    cls: Any = type("Telling", (Plain,), {name: override(name) for name in public_methods()})
    return cls


def test_every_public_method(float64: None, capfd: pytest.CaptureFixture[str]) -> None:
    """All are called as often as alone, and what they print is shown once."""
    counts, models = [], []
    x, y = data()
    for more in ({}, {"num_processes": 2}):
        capfd.readouterr()
        model = compiled(telling_class())
        on_data(model, validation_split=0.3, **more)
        model.evaluate(x, y, verbose=0, **more)
        model.predict(x, verbose=0, **more)
        model.test_on_batch(x, y)
        on_data(model, **more)
        called = [line for line in capfd.readouterr().out.splitlines() if "called" in line]
        counts.append(collections.Counter(called))
        models.append(model)
    assert counts[1] == counts[0]
    assert counts[0]["called fit"] == 2
    assert_same_state(models[1], models[0])
