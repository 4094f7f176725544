"""Every number of rows from 1 to 70, one after the other, on one model: as in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf

pytestmark = pytest.mark.both_generations
MOST = 70
RNG = np.random.default_rng(3)
X = RNG.normal(size=(MOST, 4))
Y = X.sum(1, keepdims=True)


def _model() -> Any:
    tf.keras.utils.set_random_seed(2)
    layers = tf.keras.layers
    stack = [layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dropout(0.3), layers.Dense(1)]
    model = nanotf.keras.Sequential(stack)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def _given(source: str, rows: int, batch_size: int, targets: bool) -> tuple[Any, dict[str, Any]]:
    x, y = X[:rows], Y[:rows]
    if source == "arrays":
        return ((x, y) if targets else (x,)), {"batch_size": batch_size}
    if source == "dataset":
        parts = (x, y) if targets else (x,)
        return (tf.data.Dataset.from_tensor_slices(parts).batch(batch_size),), {}

    def batches() -> Iterator[Any]:
        for first in range(0, rows, batch_size):
            place = slice(first, first + batch_size)
            yield (x[place], y[place]) if targets else (x[place],)

    return (batches(),), {}


def _check(order: str, source: str, numbers: list[int]) -> None:
    if order == "falling":
        numbers = numbers[::-1]
    elif order == "random":
        random.Random(5).shuffle(numbers)
    alone, shared = _model(), _model()
    for turn, rows in enumerate(numbers):
        batch_size = 1 + 7 * turn % 33
        found = []
        for model, how in ((alone, {}), (shared, {"num_processes": 2})):
            (x,), options = _given(source, rows, batch_size, False)
            values = model.predict(x, **options, verbose=0, **how)
            data, options = _given(source, rows, batch_size, True)
            scores = model.evaluate(*data, **options, verbose=0, **how)
            data, options = _given(source, rows, batch_size, True)
            tf.keras.utils.set_random_seed(turn)  # the next order and the next masks
            losses = model.fit(*data, **options, verbose=0, **how).history
            found.append([values, scores, losses["loss"], losses["mae"]])
        for expected, got in zip(*found, strict=True):
            text = f"{rows} rows in batches of {batch_size}"
            np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-10, err_msg=text)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["arrays", "dataset", "generator"])
@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_all(order: str, source: str, float64: None) -> None:
    _check(order, source, list(range(1, MOST + 1)))


@pytest.mark.parametrize("source", ["arrays", "dataset", "generator"])
def test_some(source: str, float64: None) -> None:
    _check("random", source, [1, 2, 3, 9])
