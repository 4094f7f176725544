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


class Halves(tf.keras.layers.Layer):  # type: ignore[misc]
    """Two rows of integers, booleans and texts for each row, and a mask of them."""

    def call(self, x: Any) -> Any:
        halves = tf.reshape(tf.cast(tf.round(10 * x), tf.int32), (-1, 2))
        return halves, halves > 0, tf.strings.as_string(halves), tf.RaggedTensor.from_tensor(halves)


class OfHalves(tf.keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.halves = tf.keras.layers.Dense(4), Halves()

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            dense = self.dense(x)
            integers, positive, texts, ragged = self.halves(dense)
            found = tf.strings.to_number(texts, tf.float32) + tf.cast(positive, tf.float32)
            found += tf.cast(integers + ragged.to_tensor(), tf.float32)
            loss = tf.reduce_mean((0.01 * tf.reshape(found, (-1, 4)) + dense - y) ** 2)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss, "rows": tf.shape(integers)[0], "ragged": ragged.nrows()}


@pytest.mark.parametrize("rows", [32, 37, 33])
def test_several_rows_for_each_row(rows: int) -> None:
    """They have no gradient, and divide evenly or not; the last batch leaves a worker without."""
    x = RNG.normal(size=(rows, 6)).astype("float32")
    y = RNG.normal(size=(rows, 4)).astype("float32")
    found = []
    for how in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(1)
        model = nanotf.accelerate(OfHalves())
        model.compile(tf.keras.optimizers.SGD(0.1))
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, **how)
        found.append((history.history, model.get_weights()))
    (alone, weights), (shared, ours) = found
    assert alone["rows"] == shared["rows"] == alone["ragged"] == shared["ragged"]
    np.testing.assert_allclose(shared["loss"], alone["loss"], rtol=1e-4)
    for mine, theirs in zip(ours, weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


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
