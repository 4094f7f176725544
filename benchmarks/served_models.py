"""Models for `benchmarks.serving`: `python -m benchmarks.served_models FOLDER NAME`.

Writes FOLDER/NAME.keras, NAME.request.json (the body of a request for one row) and
NAME.answer.json, the predictions that `model.predict` makes of that row.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def _small_cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _lstm(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((32, 16)), layers.LSTM(64), layers.Dense(8)])


def _mobilenet(keras: Any) -> Any:
    return keras.applications.MobileNetV2((96, 96, 3), weights=None)


def _encoder(keras: Any) -> Any:
    layers, width = keras.layers, 128
    inputs = x = keras.Input((64, width))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, width // 4)(x, x))
        hidden = layers.Dense(4 * width, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    outputs = layers.Dense(8)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs)


MODELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "cnn8": ("small CNN, 8x8x1", _small_cnn),
    "lstm": ("LSTM of 64 units, 32x16", _lstm),
    "mobilenet96": ("MobileNetV2, 96x96x3", _mobilenet),
    "encoder": ("transformer encoder of 2 layers, 64x128", _encoder),
}


def main(arguments: Sequence[str]) -> None:
    """Writes the files of a model."""
    import numpy as np
    import tensorflow as tf

    folder, name = pathlib.Path(arguments[0]), arguments[1]
    tf.keras.utils.set_random_seed(1)
    model = MODELS[name][1](tf.keras)
    row = np.random.default_rng(1).random((1, *model.input_shape[1:]))
    numbers = np.round(row, 4).tolist()  # as many digits as clients send
    answer = model.predict(np.asarray(numbers, "float32"), verbose=0)
    model.save(folder / f"{name}.keras")
    (folder / f"{name}.request.json").write_text(json.dumps({"instances": numbers}))
    (folder / f"{name}.answer.json").write_text(json.dumps(answer.tolist()))


if __name__ == "__main__":
    main(sys.argv[1:])
