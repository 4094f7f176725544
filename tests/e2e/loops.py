"""A custom training loop with its models and data, for the tests of `@nano`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

L = tf.keras.layers
FEATURES, CLASSES = 8, 3


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns random features (count, 8) in Keras's float type, and labels."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, FEATURES)).astype(tf.keras.backend.floatx())
    return x, random.integers(0, CLASSES, count)


def dataset(count: int = 52, batch_size: int = 16, seed: int = 0) -> Any:
    """Returns batches of `rows`."""
    return tf.data.Dataset.from_tensor_slices(rows(count, seed)).batch(batch_size)


def dense(regularizer: Any = None, seed: int = 1) -> Any:
    """Returns a model of two layers, the same at every call."""
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential(
        [
            L.Input((FEATURES,)),
            L.Dense(6, activation="tanh", kernel_regularizer=regularizer),
            L.Dense(CLASSES),
        ]
    )


def cross_entropy(**options: Any) -> Any:
    """Returns a loss object."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def plain_step(inputs: Any, model: Any, loss_object: Any, optimizer: Any) -> Any:
    """Runs a training step as TensorFlow's tutorials write it."""
    x, y = inputs
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
        if model.losses:
            loss += tf.add_n(model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def plain_train(
    model: Any, dataset: Any, loss_object: Any, optimizer: Any, train_step: Any, epochs: int = 2
) -> list[float]:
    """Trains; returns the loss of every step."""
    losses = []
    for _ in range(epochs):
        for inputs in dataset:
            losses.append(float(train_step(inputs, model, loss_object, optimizer)))
    return losses


def tolerance() -> float:
    """Returns the relative tolerance of losses."""
    return 1e-10 if tf.keras.backend.floatx() == "float64" else 1e-5


def assert_same_variables(found: list[Any], expected: list[Any]) -> None:
    """Asserts that two lists of variables hold the same values."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=100 * tolerance(), atol=10 * tolerance()
        )


def variables_of(optimizer: Any) -> list[Any]:
    """Returns an optimizer's variables in either generation."""
    found = optimizer.variables
    return list(found() if callable(found) else found)
