"""Small data and models shared by the programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def rows(count: int = 33, width: int = 4, seed: int = 0) -> Any:
    """Returns normal numbers, one row per example."""
    return np.random.default_rng(seed).normal(size=(count, width))


def images(count: int = 20, size: int = 8, channels: int = 1, seed: int = 0) -> Any:
    """Returns images with values from 0 to 1."""
    return np.random.default_rng(seed).uniform(size=(count, size, size, channels))


def labels(count: int = 33, classes: int = 3, seed: int = 1) -> Any:
    """Returns a class per example."""
    return np.random.default_rng(seed).integers(0, classes, size=count)


def tokens(count: int = 33, length: int = 6, vocabulary: int = 12, seed: int = 2) -> Any:
    """Returns sentences of different lengths, as numbers from 1 on, padded with zeros."""
    generator = np.random.default_rng(seed)
    words = generator.integers(1, vocabulary, size=(count, length))
    lengths = generator.integers(2, length + 1, size=count)
    return words * (np.arange(length)[None, :] < lengths[:, None])


def targets(x: Any, outputs: int = 1, seed: int = 3) -> Any:
    """Returns regression targets: a curved function of the rows."""
    weights = np.random.default_rng(seed).normal(size=(x.shape[1], outputs))
    return np.sin(x @ weights) + 0.3 * (x[:, :1] ** 2)


def mlp(inputs: int, *widths: int, activation: str = "tanh", last: Any = None) -> Any:
    """Returns a stack of dense layers."""
    model = tf.keras.Sequential([tf.keras.Input(shape=(inputs,))])
    for width in widths[:-1]:
        model.add(tf.keras.layers.Dense(width, activation=activation))
    model.add(tf.keras.layers.Dense(widths[-1], activation=last))
    return model


def batches(*arrays: Any, size: int = 16) -> Any:
    """Returns a dataset of batches of the arrays side by side (or of the one array)."""
    content = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(content).batch(size)
