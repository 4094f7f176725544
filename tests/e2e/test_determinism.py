"""With `enable_op_determinism()`: one process's results, and equal bits from run to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

from nanotf.compat.process_state import ProcessState
from nanotf.keras import Sequential, nano, nano_multiprocessing

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
ROWS, BATCH = 41, 10


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = ProcessState.capture()
    tf.config.experimental.enable_op_determinism()
    yield
    before.restore()


def _images() -> tuple[list[Any], tuple[int, ...]]:
    layers = [L.Conv2D(4, 3), L.BatchNormalization(), L.MaxPooling2D(), L.Flatten()]
    return [L.Input((8, 8, 1)), *layers, L.Dropout(0.2), L.Dense(3)], (8, 8, 1)


def _tokens() -> tuple[list[Any], tuple[int, ...]]:
    return [L.Input((6,)), L.Embedding(9, 4), L.LSTM(3), L.Dense(3)], (6,)


def _bags() -> tuple[list[Any], tuple[int, ...]]:
    """Looked-up rows and dropout; tracing the cells of `_tokens` takes seconds."""
    layers = [L.Embedding(9, 4), L.GlobalAveragePooling1D(), L.Dropout(0.2), L.Dense(3)]
    return [L.Input((6,)), *layers], (6,)


def compiled(make: Callable[[], tuple[list[Any], tuple[int, ...]]]) -> tuple[Any, Any, Any]:
    tf.keras.utils.set_random_seed(1)
    layers, shape = make()
    model = Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    random = np.random.default_rng(3)
    return model, random.integers(0, 9, (ROWS, *shape)), random.integers(0, 3, ROWS)


@pytest.mark.parametrize("make", [_images, _tokens])
def test_models(make: Any, float64: None) -> None:
    runs: list[Any] = []
    for more in ({}, {"num_processes": 2}, {"num_processes": 2}):
        model, x, y = compiled(make)
        options = {"batch_size": BATCH, "verbose": 0, **more}
        history = model.fit(x, y, epochs=2, validation_split=0.2, **options).history
        loss, outputs = model.evaluate(x, y, **options), model.predict(x, **options)
        runs.append((model, history, loss, outputs))
    alone, first, second = runs
    assert_same_history(first[1], alone[1])
    assert_same_state(first[0], alone[0])
    np.testing.assert_allclose(first[2], alone[2], rtol=1e-10)
    np.testing.assert_allclose(first[3], alone[3], rtol=1e-10)
    assert first[1:3] == second[1:3]
    assert first[3].tobytes() == second[3].tobytes()
    for one, other in zip(first[0].get_weights(), second[0].get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_loops(float64: None) -> None:
    def train() -> Any:
        model, x, y = compiled(_bags)

        @nano_multiprocessing
        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step, tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1).batch(BATCH)

    def losses() -> list[float]:
        step, dataset = train()
        return [float(step(x, y)) for _ in range(2) for x, y in dataset]

    alone, first, second = losses(), *(nano(num_processes=2)(losses)() for _ in range(2))
    np.testing.assert_allclose(first, alone, rtol=1e-9)
    assert first == second
