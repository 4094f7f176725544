"""Models with steps of their own, and the comparison of what they report."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from parity import assert_same_history

from nanotf.keras import Model

L = tf.keras.layers
ROWS, BATCH, WIDTH = 41, 10, 4  # the last batch has one row: fewer than workers


def data_of_steps() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.normal(size=(ROWS, WIDTH)), random.normal(size=(ROWS, 2))


class OwnStepOfMetrics(Model):
    """Returns the results of its own metrics, and the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2, activation="sigmoid")
        self.mean = tf.keras.metrics.Mean(name="loss")
        self.auc = tf.keras.metrics.AUC(name="auc")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean, self.auc]

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def _logs(self, y: Any, predicted: Any, loss: Any) -> Any:
        self.mean.update_state(loss)
        self.auc.update_state(tf.cast(y > 0, predicted.dtype), predicted)
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        return {**{metric.name: metric.result() for metric in self.metrics}, "rate": rate}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(predicted - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self._logs(y, predicted, loss)

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x)
        return self._logs(y, predicted, tf.reduce_mean(tf.square(predicted - y)))


def assert_same_logs(cls: Any, x: Any, y: Any, eagerly: bool) -> None:
    """Compares the results of `fit`, validation and `evaluate` with a single process's."""
    histories, values = [], []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = cls()
        model.compile(tf.keras.optimizers.SGD(0.01), "mse", metrics=["mae"], run_eagerly=eagerly)
        model(x[:1])
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, num_processes=processes,
            validation_data=(x[:21], y[:21]),
        )  # fmt: skip
        histories.append(history.history)
        values.append(
            model.evaluate(
                x, y, batch_size=BATCH, verbose=0, num_processes=processes, return_dict=True
            )
        )
    assert_same_history(histories[1], histories[0])
    assert_same_history(values[1], values[0])


class Stepped(Model):
    """A model whose step computes its loss by a function of a batch, the model and its outputs."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.own_loss = loss
        self.hidden, self.out = L.Dense(3), L.Dense(2)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.own_loss(self, data)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}
