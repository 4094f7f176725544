"""Models with an embedding, their data, and the options of `SparseAdam`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from parity import L

from nanotf.keras import Sequential
from nanotf.keras.layers import Embedding

O = tf.keras.optimizers  # noqa: E741
KerasAdam, KerasEmbedding = O.Adam, L.Embedding
ROWS, WORDS, WIDTH = 52, 30, 4


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, some repeated, from another part of the vocabulary each step; and targets."""
    random = np.random.default_rng(3)
    tokens = (np.arange(rows) // 16 * 4)[:, None] + random.integers(0, 9, (rows, 5))
    return tokens.astype("int32"), random.normal(size=rows)


def model_of(
    optimizer: Any,
    layer: Callable[..., Any] = Embedding,
    jit_compile: bool = False,
    **options: Any,
) -> Any:
    tf.keras.utils.set_random_seed(5)
    model = Sequential(
        [
            L.Input((5,), dtype="int32"),
            layer(WORDS, WIDTH, **options),
            L.GlobalAveragePooling1D(),
            L.Dense(13, activation="tanh"),
            L.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "clipnorm": {"clipnorm": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.01},
    "clipvalue": {"clipvalue": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "use_ema": {"use_ema": True, "ema_overwrite_frequency": 3},
}
