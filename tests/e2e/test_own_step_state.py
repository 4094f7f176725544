"""Attributes and random generators that own steps and callbacks change are as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from own_steps import BATCH, Stepped, data_of_steps
from parity import assert_same_state

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers


class Weighted(Model):  # type: ignore[misc, valid-type]
    """A model with a plain attribute that its step reads, as a VAE's `beta`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)
        self.beta = 1.0

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.beta * tf.reduce_mean((self(x) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def get_config(self) -> Any:
        return {}


class _Anneals(tf.keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.beta = 0.5

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.beta += 1.0


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.every_case
def test_an_attribute_that_a_callback_sets(float64: None, eagerly: bool) -> None:
    """A trace reads the value from when it is made, a step without trace each value."""
    models, losses = [], []
    for arguments in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model = Weighted()
        model.compile(tf.keras.optimizers.SGD(0.01), run_eagerly=eagerly)
        fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [_Anneals()]}
        losses.append(model.fit(*data_of_steps(), epochs=3, **fit, **arguments).history["loss"])
        assert model.beta == 3.5
        models.append(model)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    assert_same_state(models[1], models[0])


class Counting(Weighted):
    """A model whose eager steps read values and count, as code under a debugger does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        self.steps += 1
        self.beta = 1.0 if self.steps < 4 else 0.5
        logs = super().train_step(data)
        assert float(logs["loss"].numpy()) >= 0.0
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        self.steps += 100
        return {"loss": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}

    def predict_step(self, data: Any) -> Any:
        self.steps += 10_000
        return self(data[0] if isinstance(data, tuple) else data)


@pytest.mark.both_generations
def test_attributes_that_eager_steps_change(float64: None) -> None:
    """They come back after each method, and the next one continues with them."""
    models, results, counts = [], [], []
    for options in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model = Counting()
        model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
        given = {"batch_size": BATCH, "verbose": 0, **options}
        history = model.fit(*data_of_steps(), shuffle=False, **given).history["loss"]
        counts.append([model.steps])
        results.append([history, model.evaluate(*data_of_steps(), **given)])
        counts[-1].append(model.steps)
        results[-1] += [model.predict(data_of_steps()[0], **given)]
        counts[-1].append(model.steps)
        results[-1] += [model.fit(*data_of_steps(), shuffle=False, **given).history["loss"]]
        counts[-1].append(model.steps)
        models.append(model)
    assert counts[1] == counts[0]
    for ours, theirs in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert_same_state(models[1], models[0])


class Noisy(Stepped):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return super().train_step((x + tf.keras.random.normal(tf.shape(x)), y))


def _squared(model: Any, data: Any) -> Any:
    return tf.reduce_mean((model(data[0]) - data[1]) ** 2)


@pytest.mark.skipif(not is_keras_3(), reason="Keras 2 has no global generator of random numbers")
def test_a_callback_draws_from_the_generator_of_the_step(float64: None) -> None:
    """The program is one whose callback shows generated images at the end of each epoch."""
    models, results = [], []
    for options in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model, drawn = Noisy(_squared), []
        model.compile(tf.keras.optimizers.SGD(0.05))

        def draw(*_: Any, into: list[float] = drawn) -> None:
            into.append(float(tf.keras.random.normal((1,))[0]))

        shows = tf.keras.callbacks.LambdaCallback(on_epoch_end=draw)
        given = {"batch_size": BATCH, "verbose": 0, "callbacks": [shows], **options}
        losses = model.fit(*data_of_steps(), epochs=3, **given).history["loss"]
        draw()
        results.append([losses, drawn])
        models.append(model)
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-10)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-10)
    assert_same_state(models[1], models[0])
