"""Metrics whose state is not a sum over rows equal those of a single process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from own_steps import OwnStepOfMetrics, assert_same_logs
from parity import assert_same_history, fit_both

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Sequential

L, M = tf.keras.layers, tf.keras.metrics
IS_KERAS_3 = is_keras_3()
ROWS, BATCH, WIDTH = 41, 10, 4  # the last batch has one row: fewer than workers


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    return x, np.stack([np.tanh(x.sum(1)), x[:, 0]], axis=1)


class Largest(M.Metric):
    """The largest error, the number of batches, and their mean largest error."""

    def __init__(self, name: str = "largest", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.largest = self.add_weight(name="largest", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")
        self.mean = M.Mean()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = tf.reduce_max(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred), axis=-1)
        if sample_weight is not None:
            errors *= tf.reshape(tf.cast(sample_weight, errors.dtype), [-1])
        error = tf.reduce_max(errors)
        self.largest.assign(tf.maximum(self.largest, error))
        self.batches.assign_add(1.0)
        self.mean.update_state(error)

    def result(self) -> Any:
        return self.largest + 10.0 * self.batches + 100.0 * self.mean.result()

    def reset_state(self) -> None:
        self.largest.assign(0.0)
        self.batches.assign(0.0)
        self.mean.reset_state()


class Remembering(M.Metric):
    """Keeps, over all epochs, an average of batches in a variable of TensorFlow's own."""

    def __init__(self, name: str = "remembering", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.level = tf.Variable(1.0, dtype=tf.float64, trainable=False)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred)) ** 2
        self.level.assign(0.75 * self.level + 0.25 * error)

    def result(self) -> Any:
        return tf.identity(self.level)

    def reset_state(self) -> None:
        pass


class MostlyMean(M.Mean):
    """Updates Keras's own state in another way."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        y_true = tf.cast(y_true, y_pred.dtype)
        return super().update_state(tf.math.reduce_std(y_true - y_pred), sample_weight=None)


def model_of(metrics: list[Any], weighted: list[Any] | None = None) -> Any:
    tf.keras.utils.set_random_seed(4)
    model = Sequential([L.Input((WIDTH,)), L.Dense(3, activation="tanh"), L.Dense(2)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", metrics=metrics, weighted_metrics=weighted)
    return model


def over_rows() -> list[Any]:
    """Returns Keras's own metric, reducing over the batch."""
    found: list[Any] = [M.CosineSimilarity(axis=0, name="cosine")]
    for name in ("PearsonCorrelation", "ConcordanceCorrelation"):
        if hasattr(M, name):
            found.append(getattr(M, name)(axis=0, name=name))
    return found


@pytest.mark.both_generations
def test_metrics_of_compile(float64: None) -> None:
    """Compares validation, a second `fit`, `evaluate`, and the logs of batches, too."""
    x, y = data()
    heard: dict[bool, list[Any]] = {}

    def make() -> Any:
        first = bool(heard)
        heard[first] = []
        metrics = [Largest(), Remembering(), MostlyMean(name="std"), *over_rows(), "mae"]
        model = model_of(metrics)
        model.heard = heard[first]
        return model

    class Hears(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.heard.append({name: float(value) for name, value in logs.items()})

    arguments: dict[str, Any] = {
        "x": x, "y": y, "batch_size": BATCH, "validation_data": (x[:21], y[:21])
    }  # fmt: skip
    found, expected = fit_both(make, **arguments, callbacks=[Hears()])
    for ours, theirs in zip(found.heard, expected.heard, strict=True):
        assert_same_history(ours, theirs)
    for processes in (2, None):
        again = [
            model.fit(**arguments, shuffle=False, verbose=0, num_processes=number).history
            for model, number in ((found, processes), (expected, None))
        ]
        assert_same_history(*again)
        values = [
            model.evaluate(x, y, BATCH, verbose=0, return_dict=True, num_processes=number)
            for model, number in ((found, processes), (expected, None))
        ]
        assert_same_history(*values)
        results = [model.get_metrics_result() for model in (found, expected)]
        assert_same_history(*[{k: float(v) for k, v in r.items()} for r in results])


def test_metric_of_unknown_rank(float64: None) -> None:
    """Keras 3 rejects such a metric in a single process."""
    if IS_KERAS_3:
        pytest.skip("Keras rejects a metric of unknown rank")

    def spread(y: Any, predicted: Any) -> Any:
        return tf.py_function(lambda p: np.std(p), [predicted], tf.float64)

    def errors(y: Any, predicted: Any) -> Any:
        return tf.py_function(lambda a, p: np.abs(a - p)[:, 0], [y, predicted], tf.float64)

    x, y = data()
    fit_both(lambda: model_of([spread, errors]), x=x, y=y, batch_size=BATCH)


def test_weighted_metrics(float64: None) -> None:
    x, y = data()
    weights = np.random.default_rng(1).integers(0, 4, ROWS).astype("float64")
    arguments: dict[str, Any] = {"x": x, "y": y, "batch_size": BATCH, "sample_weight": weights}
    fit_both(lambda: model_of([], [Largest(), MostlyMean(name="std")]), **arguments)


class Smoothed(M.Metric):
    """An exponential average of the losses of batches."""

    def __init__(self, name: str = "smoothed", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.level = self.add_weight(name="level", initializer="ones")

    def update_state(self, loss: Any) -> None:
        self.level.assign(0.75 * self.level + 0.25 * loss)

    def result(self) -> Any:
        return self.level + 0.0


class OwnStep(OwnStepOfMetrics):
    """Updates metrics with rows and with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = Largest()
        self.smoothed = Smoothed()

    @property
    def metrics(self) -> list[Any]:
        return [self.largest, self.smoothed]

    def _logs(self, y: Any, predicted: Any, loss: Any) -> Any:
        self.largest.update_state(y, predicted)
        self.smoothed.update_state(loss)
        return {
            "largest": self.largest.result(),
            "smoothed": self.smoothed.result(),
            "root": tf.sqrt(self.smoothed.result()),
        }


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.both_generations
def test_metrics_of_own_steps(float64: None, eagerly: bool) -> None:
    assert_same_logs(OwnStep, *data(), eagerly)
