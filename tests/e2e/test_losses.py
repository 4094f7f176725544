"""Losses and metrics of users, and what hangs on a tensor that they get: logits, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import fit_both

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import nano

pytestmark = pytest.mark.both_generations
L = tf.keras.layers
LOSSES = tf.keras.losses
ROWS = 22
RNG = np.random.default_rng(1)
# Far from 0, so that a probability that is clipped differs from its logits.
X = 40 * RNG.normal(size=(ROWS, 4))
ONE = (X.sum(1, keepdims=True) > 0).astype("float64")
ONE[::5] = 1 - ONE[::5]
CLASS = RNG.integers(0, 3, ROWS)
SIZES = [pytest.param(9, id="uneven"), pytest.param(11, id="even"), pytest.param(1, id="rows")]


def _stack(*last: Any) -> Any:
    return nanotf.keras.Sequential([L.Input((4,)), L.Dense(6), *last])


def dice(y: Any, p: Any) -> Any:
    y = tf.cast(y, p.dtype)
    overlap = 2 * tf.reduce_sum(y * p, -1) / (tf.reduce_sum(y + p, -1) + 1)
    return 1 - overlap + LOSSES.binary_crossentropy(y, p)


def focal(y: Any, p: Any) -> Any:
    y = tf.cast(y, p.dtype)
    entropy = LOSSES.binary_crossentropy(y, p)
    right = tf.reduce_mean(y * p + (1 - y) * (1 - p), -1)
    return (1 - right) ** 2 * entropy


class Subclass(LOSSES.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return LOSSES.binary_crossentropy(y, p) + tf.reduce_mean(tf.square(p), -1)


def of_the_batch(y: Any, p: Any) -> Any:
    """Depends on all rows: a share of the batch."""
    error = tf.square(tf.cast(y, p.dtype) - p)
    return tf.reduce_sum(error, -1) / (tf.reduce_max(error) + 1)


def hardest(y: Any, p: Any) -> Any:
    error = tf.reduce_mean(tf.square(tf.cast(y, p.dtype) - p), -1)
    return tf.sort(error)[-1]


ON_A_SIGMOID: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda y, p: LOSSES.binary_crossentropy(y, p),
    "class": lambda: LOSSES.BinaryCrossentropy(label_smoothing=0.1),
    "focal class": lambda: LOSSES.BinaryFocalCrossentropy(),
    "dice": lambda: dice,
    "focal": lambda: focal,
    "subclass": Subclass,
    "of the batch": lambda: of_the_batch,
    "hardest": lambda: hardest,
}
if is_keras_3():
    ON_A_SIGMOID["keras.ops"] = lambda: (
        lambda y, p: tf.keras.ops.binary_crossentropy(tf.keras.ops.cast(y, p.dtype), p)
    )


@pytest.mark.parametrize("batch_size", SIZES)
@pytest.mark.parametrize("kind", ON_A_SIGMOID)
def test_a_sigmoid(kind: str, batch_size: int, float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)  # before any layer: Keras 3 draws their seeds at once
        model = _stack(L.Dense(1, activation="sigmoid"))
        model.compile(tf.keras.optimizers.SGD(0.01), ON_A_SIGMOID[kind](), metrics=["accuracy"])
        return model

    fit_both(make, x=X, y=ONE, batch_size=batch_size, shuffle=False, validation_data=(X, ONE))


@pytest.mark.parametrize("batch_size", SIZES)
@pytest.mark.parametrize("kind", ["function", "class", "layer"])
def test_a_softmax(kind: str, batch_size: int, float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)  # before any layer: Keras 3 draws their seeds at once
        last = [L.Dense(3), L.Softmax()] if kind == "layer" else [L.Dense(3, activation="softmax")]
        model = _stack(*last)
        loss: Any = LOSSES.SparseCategoricalCrossentropy()
        if kind == "function":

            def loss(y: Any, p: Any) -> Any:
                return LOSSES.sparse_categorical_crossentropy(y, p)

        model.compile(tf.keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
        return model

    fit_both(make, x=X, y=CLASS, batch_size=batch_size, shuffle=False)


@pytest.mark.parametrize("batch_size", SIZES)
def test_a_class_that_is_ignored(batch_size: int, float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)  # before any layer: Keras 3 draws their seeds at once
        model = _stack(L.Dense(3))
        loss = LOSSES.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model.compile(tf.keras.optimizers.SGD(0.01), loss)
        return model

    shared, alone = fit_both(
        make, x=X, y=CLASS, batch_size=batch_size, shuffle=False, validation_data=(X, CLASS)
    )
    options = {"batch_size": batch_size, "verbose": 0}
    expected = alone.evaluate(X, CLASS, **options)
    found = shared.evaluate(X, CLASS, **options, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


class Autoencoder(nanotf.keras.Model):
    """A variational autoencoder with its own step, in the manner of Keras's example."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = L.Dense(2), L.Dense(2)
        self.decoder = tf.keras.Sequential([L.Dense(6, "relu"), L.Dense(4, "sigmoid")])

    def call(self, x: Any) -> Any:
        return self.decoder(self.mean(x))

    def train_step(self, data: Any) -> Any:
        x, target = data
        with tf.GradientTape() as tape:
            mean, spread = self.mean(x), 0.01 * self.spread(x)
            rebuilt = self.decoder(mean + tf.exp(spread))
            entropy = LOSSES.binary_crossentropy(target, rebuilt)
            divergence = -0.5 * (1 + spread - tf.square(mean) - tf.exp(spread))
            loss = tf.reduce_mean(entropy) + tf.reduce_mean(tf.reduce_sum(divergence, 1))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss, "entropy": tf.reduce_mean(entropy)}


@pytest.mark.parametrize("batch_size", SIZES)
def test_a_step_of_the_users(batch_size: int, float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)  # before any layer: Keras 3 draws their seeds at once
        model = Autoencoder()
        model(X[:2])
        model.spread(X[:2])
        model.compile(tf.keras.optimizers.SGD(1e-5))
        return model

    fit_both(make, x=X, y=1 / (1 + np.exp(-X)), batch_size=batch_size, shuffle=False)


class Endpoint(L.Layer):
    """Gets the targets as an input, calls a loss, and adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = LOSSES.BinaryCrossentropy(from_logits=True)

    def call(self, targets: Any, logits: Any) -> Any:
        self.add_loss(self.entropy(targets, logits))
        return tf.nn.sigmoid(logits)


@pytest.mark.parametrize("batch_size", SIZES)
def test_an_endpoint_layer(batch_size: int, float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)  # before any layer: Keras 3 draws their seeds at once
        x, y = L.Input((4,), name="x"), L.Input((1,), name="y")
        model = nanotf.keras.Model([x, y], Endpoint()(y, L.Dense(1)(x)))
        model.compile(tf.keras.optimizers.SGD(0.01))
        return model

    fit_both(make, x={"x": X, "y": ONE}, batch_size=batch_size, shuffle=False)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_a_loop(rows: int, float64: None) -> None:
    def trained(workers: int) -> list[float]:
        tf.keras.utils.set_random_seed(4)
        model, optimizer = _stack(L.Dense(1, activation="sigmoid")), tf.keras.optimizers.SGD(0.01)

        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                p = model(x, training=True)
                loss = tf.reduce_mean(dice(y, p)) + tf.reduce_mean(
                    LOSSES.binary_crossentropy(y, tf.identity(p))
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @nano(num_processes=workers)
        def loop() -> list[float]:
            data = tf.data.Dataset.from_tensor_slices((X, ONE)).batch(rows)
            return [float(step(x, y)) for x, y in data]

        return loop()

    np.testing.assert_allclose(trained(2), trained(1), rtol=1e-9)
