"""Python control flow on tensors is converted where Keras converts it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, numbers

from nanotf import nano, nano_multiprocessing
from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
FIT = {"batch_size": 10, "epochs": 2, "verbose": 0}


def controlled(x: Any) -> Any:
    """Uses every kind of control flow that AutoGraph converts, on own rows alone."""
    total = tf.zeros_like(x)
    if tf.reduce_any(tf.abs(x) >= 0.0):
        total += x
    else:
        total -= 100.0
    for number in tf.range(3):
        if number == 1:
            continue
        total += x * tf.cast(number, x.dtype)
    count = tf.constant(0)
    while count < 4:
        count += 1
        if count > 2:
            break
        total += 0.1 * tf.sin(x)
    if len(tf.shape(x)) > 5:
        total *= 1000.0
    return total / 4.0


class Controlled(L.Layer):  # type: ignore[misc]
    """A layer with control flow in `call`, and in a function that it calls."""

    def call(self, x: Any) -> Any:
        if tf.reduce_any(tf.abs(x) >= 0.0):
            x = controlled(x)
        return x


def loss_of(y: Any, p: Any) -> Any:
    return tf.reduce_mean(controlled(y - p) ** 2, -1)


def metric_of(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.abs(controlled(y - p)), -1)


class OwnLoss(tf.keras.losses.Loss):  # type: ignore[misc]
    def call(self, y: Any, p: Any) -> Any:
        return loss_of(y, p)


class OwnMetric(tf.keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        values = metric_of(y, p)
        if tf.reduce_any(values >= 0.0):
            values *= 2.0
        return super().update_state(values, sample_weight)


class OwnSteps(Model):  # type: ignore[misc]
    """A model with control flow in its steps and its `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(controlled(x))

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        scale = tf.constant(1.0, loss.dtype)
        if loss > 0.5:
            scale = tf.constant(0.5, loss.dtype)
        self.optimizer.apply_gradients(
            zip([scale * g for g in gradients], self.trainable_variables, strict=True)
        )
        return {"loss": loss}


class Stacked(Model):  # type: ignore[misc]
    """Layers in a row, not called before the first step."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.parts = [L.Dense(2), layer or L.Activation("tanh"), L.Dense(1)]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class Asserting(L.Layer):  # type: ignore[misc]
    """A layer with an `assert` on a tensor, which AutoGraph converts only if it is told to."""

    def call(self, x: Any) -> Any:
        assert tf.reduce_all(tf.abs(x) < 1e9)
        return x


def stacked(loss: Any = "mse", metric: Any = "mae", layer: Any = None) -> Any:
    model = Stacked(layer)
    model.compile(tf.keras.optimizers.SGD(0.05), loss, metrics=[metric])
    return model


def own_steps() -> Any:
    model = OwnSteps()
    model.compile(tf.keras.optimizers.SGD(0.05))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "layer": lambda: stacked(layer=Controlled()),
    "lambda": lambda: stacked(layer=L.Lambda(controlled)),
    "assert": lambda: stacked(layer=Asserting()),
    "loss": lambda: stacked(loss=loss_of),
    "loss class": lambda: stacked(loss=OwnLoss()),
    "metric": lambda: stacked(metric=metric_of),
    "metric class": lambda: stacked(metric=OwnMetric()),
    "steps": own_steps,
}


def results(name: str, **more: Any) -> Any:
    """Returns what a model's methods return, or the class of the first error."""
    x, y = numbers()
    tf.keras.utils.set_random_seed(1)
    try:
        model = MODELS[name]()
        history = model.fit(x, y, shuffle=False, **FIT, **more).history
        evaluated = model.evaluate(x, y, verbose=0, **more)
        return model, history, evaluated, model.predict(x, verbose=0, **more)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every_case
def test_models(name: str, float64: None) -> None:
    alone, found = results(name), results(name, num_processes=2)
    if isinstance(alone, Exception):
        assert isinstance(found, type(alone)) or isinstance(found.__cause__, type(alone)), found
        return
    assert not isinstance(found, Exception), found
    assert_same_history(found[1], alone[1])
    assert_same_state(found[0], alone[0])
    np.testing.assert_allclose(found[2], alone[2], rtol=1e-10)
    np.testing.assert_allclose(found[3], alone[3], rtol=1e-9)


def test_what_keras_converts() -> None:
    """Keras 3 converts nothing; Keras 2 what its own code calls, but for a step."""
    trained = {name for name in MODELS if not isinstance(results(name), Exception)}
    converted = {"layer", "loss", "loss class", "metric", "metric class"}
    assert trained == (set() if is_keras_3() else converted)


def test_a_loop(float64: None) -> None:
    x, y = numbers()
    found = []
    for size in (None, 2):
        tf.keras.utils.set_random_seed(1)
        model = stacked()
        optimizer = tf.keras.optimizers.SGD(0.05)

        @nano_multiprocessing
        def step(rows: Any, targets: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((controlled(model(rows)) - targets) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            if loss > 0.5:
                gradients = [0.5 * g for g in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def train(batches: Any, step: Any = step) -> list[float]:
            return [float(step(rows, targets)) for rows, targets in batches]

        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
        run = train if size is None else nano(num_processes=size)(train)
        found.append(run(batches))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)
