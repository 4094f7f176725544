"""A compiled model whose private names tests look up."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

L = tf.keras.layers


def compiled_model() -> Any:
    model = tf.keras.Sequential([L.Input((3,)), L.Dense(2), L.Dropout(0.1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model
