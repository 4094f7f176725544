"""A small model around any layer, for the tests of what arrives in workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from nanotf.keras import Model

L = tf.keras.layers
FIT = {"batch_size": 10, "epochs": 2, "verbose": 0}


def with_layer(make: Callable[[], Any], optimizer: Any = None) -> Any:
    tf.keras.utils.set_random_seed(1)
    inputs = L.Input((3,))
    model = Model(inputs, L.Dense(1)(make()(inputs)))
    model.compile(optimizer or tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model
