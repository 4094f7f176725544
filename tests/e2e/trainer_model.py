"""A small model and its data, for the cases of Keras's own trainer tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.keras import Sequential

L = tf.keras.layers
FLOAT = "float64"


def example(**compile_arguments: Any) -> Any:
    """Returns two dense layers, the same at every call."""
    tf.keras.utils.set_random_seed(4)
    model = Sequential([L.Input((4,)), L.Dense(5, activation="tanh"), L.Dense(3)])
    model.compile(**{"optimizer": tf.keras.optimizers.SGD(0.1), "loss": "mse", **compile_arguments})
    return model


def rows_of(rows: int, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(FLOAT)


def targets_of(x: np.ndarray, width: int = 3) -> np.ndarray:
    return np.stack([x.sum(1) * (i + 1) for i in range(width)], axis=1)


X = rows_of(46)
Y = targets_of(X)
