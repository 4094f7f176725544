"""Losses and metrics that own steps report are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from own_steps import BATCH, OwnStepOfMetrics, assert_same_logs, data_of_steps
from parity import assert_same_history

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers


class LossOfOneOutput(Model):
    """Returns two outputs, and its step passes one of them to the losses of `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        out = self.out(inputs)
        return {"largest": tf.reduce_max(out, 1), "out": out}

    def _loss_of(self, data: Any, training: bool) -> Any:
        x, y = data
        return self.compute_loss(x, y, self(x, training=training)["out"])

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss_of(data, True)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        self._loss_of(data, False)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.skipif(
    is_keras_3(), reason="Keras 3 builds losses from the model's outputs, without the step"
)
@pytest.mark.parametrize("first", ["fit", "evaluate"])
def test_a_step_that_passes_one_of_two_outputs_to_the_loss(float64: None, first: str) -> None:
    """There is one loss to report, not one for each output that the model has."""
    x, y = data_of_steps()
    results = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = LossOfOneOutput()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model(x[:1])
        given: Any = {"batch_size": BATCH, "verbose": 0, "num_processes": processes}
        if first == "fit":
            results.append(model.fit(x, y, epochs=2, shuffle=False, **given).history)
        else:
            results.append(model.evaluate(x, y, return_dict=True, **given))
    assert list(results[1]) == list(results[0]) == ["loss"]
    assert_same_history(results[1], results[0])


class OwnLogs(Model):
    """Adds to the results of Keras's metrics: a mean, and a value derived from a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "bias": tf.reduce_mean(y_pred - y), "root": tf.sqrt(logs["mae"])}


class OwnStepOfGradients(OwnStepOfMetrics):
    """Clips and accumulates gradients, applies the sum every other step, and reports the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = tf.keras.metrics.Mean(name="norm")
        self.steps = tf.Variable(0, trainable=False)

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.norm]

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.out.build(shape)
        self.sums = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for v in self.trainable_variables
        ]

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = tf.reduce_mean(tf.square(predicted - y))
            inner = tape.gradient(loss, weights)
            penalty = tf.linalg.global_norm(inner)
        second = outer.gradient(penalty, weights)
        gradients = [a + 0.1 * b for a, b in zip(inner, second, strict=True)]
        clipped, norm = tf.clip_by_global_norm(gradients, 0.2)
        for total, gradient in zip(self.sums, clipped, strict=True):
            total.assign_add(gradient)
        self.steps.assign_add(1)
        applied = [t * tf.cast(self.steps % 2 == 0, t.dtype) for t in self.sums]
        self.optimizer.apply_gradients(zip(applied, weights, strict=True))
        for total, gradient in zip(self.sums, applied, strict=True):
            total.assign_sub(gradient)
        self.norm.update_state(norm)
        return self._logs(y, predicted, loss)


@pytest.mark.parametrize(
    ("cls", "eagerly"),
    [
        (OwnLogs, False),
        (OwnStepOfMetrics, False),
        (OwnStepOfMetrics, True),
        (OwnStepOfGradients, False),
        (OwnStepOfGradients, True),
    ],
)
def test_metrics_in_own_logs(float64: None, cls: Any, eagerly: bool) -> None:
    """The last batch has no row for one of the workers."""
    assert_same_logs(cls, *data_of_steps(), eagerly)
