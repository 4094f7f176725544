"""Compares `fit(num_processes=2)` with plain `fit`, on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from nanotf.keras import Sequential

L = tf.keras.layers

# Relative, of losses and metrics per epoch: DESIGN.md's promise.
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}


def digits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first `rows` digits: images (rows, 8, 8, 1) in [0, 1], and labels."""
    data = load_digits()
    images = (data.images[:rows, ..., None] / 16).astype(tf.keras.backend.floatx())
    return images, data.target[:rows]


def numbers(rows: int = 41) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of three numbers, and a target for each, in float64."""
    random = np.random.default_rng(3)
    return random.normal(size=(rows, 3)), random.normal(size=(rows, 1))


def weights(rows: int) -> np.ndarray:
    """Returns sample weights, including zeros, that differ widely between rows."""
    return np.random.default_rng(7).integers(0, 5, rows).astype(tf.keras.backend.floatx())


def small_cnn(optimizer: Any = None, weighted: bool = False, frozen: bool = False) -> Any:
    """Returns a compiled convolutional model without randomness in training."""
    tf.keras.utils.set_random_seed(11)
    model = Sequential(
        [
            L.Input((8, 8, 1)),
            L.Conv2D(4, 3, activation="relu"),
            L.Flatten(),
            L.Dense(16, activation="tanh", kernel_regularizer="l2"),
            L.Dense(10),
        ]
    )
    model.layers[0].trainable = not frozen
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy"]
    model.compile(
        optimizer if optimizer is not None else tf.keras.optimizers.SGD(0.1),
        loss,
        metrics=metrics,
        weighted_metrics=["accuracy"] if weighted else None,
    )
    return model


def optimizer_state(model: Any) -> list[np.ndarray]:
    """Returns the optimizer's variables: step count, then slots."""
    found = model.optimizer.variables
    return [np.asarray(v) for v in (found() if callable(found) else found)]


def assert_same_history(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that per-epoch losses and metrics agree within `TOLERANCE`."""
    assert list(found) == list(expected)
    tolerance = TOLERANCE[tf.keras.backend.floatx()]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, err_msg=name)


def assert_same_state(found: Any, expected: Any) -> None:
    """Asserts that weights and optimizer state of two models agree."""
    tolerance = TOLERANCE[tf.keras.backend.floatx()]
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance)
    ours, theirs = optimizer_state(found), optimizer_state(expected)
    assert int(found.optimizer.iterations.numpy()) == int(expected.optimizer.iterations.numpy())
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance)


def fit_both(make: Callable[[], Any], **arguments: Any) -> tuple[Any, Any]:
    """Trains two equal models, one with a single process, one with two processes. They must agree.

    Args:
        make: makes a compiled model, the same at every call.
        **arguments: of `fit`; `epochs` is 2 unless given.

    Returns:
        A tuple of the model that two processes trained, and the model of the single process.
    """
    arguments = {"epochs": 2, "verbose": 0, **arguments}
    expected, found = make(), make()
    expected_history = expected.fit(**arguments)
    found_history = found.fit(**arguments, num_processes=2)
    assert found_history.epoch == expected_history.epoch
    assert_same_history(found_history.history, expected_history.history)
    assert_same_state(found, expected)
    return found, expected
