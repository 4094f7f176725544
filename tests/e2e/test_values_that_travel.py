"""Datasets and unusual variables arrive in workers with their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, numbers
from travels import FIT, with_layer

from nanotf import nano
from nanotf.keras import Model
from nanotf.pool import warm

pytestmark = pytest.mark.both_generations

L = tf.keras.layers


class Retrieving(Model):  # type: ignore[misc]
    """Compares its rows with those of a dataset, which it embeds by its own weights."""

    def __init__(self, candidates: Any) -> None:
        super().__init__()
        self.embed = L.Dense(2)
        self.out = L.Dense(1)
        self.embed.build((None, 3))
        rows = candidates.batch(4).map(lambda x: tf.tanh(tf.matmul(x, self.embed.kernel)))
        self.candidates = rows.map(lambda x: x * 1.5)
        self.adapted = L.Normalization()
        self.adapted.adapt(candidates.batch(4))
        self.read_by_python = candidates.map(lambda x: tf.numpy_function(lambda v: v, [x], x.dtype))

    def call(self, x: Any) -> Any:
        own = tf.tanh(self.embed(self.adapted(x)))
        start = tf.zeros_like(own[:, :1])
        found = self.candidates.reduce(
            start, lambda most, rows: tf.maximum(most, tf.reduce_max(own @ tf.transpose(rows)))
        )
        return self.out(own) + found


def test_datasets_of_a_model(float64: None) -> None:
    x, y = numbers()
    models, histories = [], []
    for more in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(1)
        model = Retrieving(tf.data.Dataset.from_tensor_slices(x[:7]))
        model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        model.fit(x, y, **FIT, **more)
        histories.append(model.fit(x, y, **FIT, **more).history)
        models.append(model)
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])


class Growing(L.Layer):  # type: ignore[misc]
    """A layer with a text and an array of any length in variables."""

    def __init__(self) -> None:
        super().__init__()
        self.text = tf.Variable("a", trainable=False)
        self.grown = tf.Variable([0.0], shape=[None], trainable=False, validate_shape=False)
        self.text.assign("abc")
        self.grown.assign([1.0, 2.0, 3.0])

    def call(self, x: Any) -> Any:
        length = tf.strings.length(self.text.read_value())
        total = tf.reduce_sum(self.grown.read_value())
        return x * tf.cast(length, x.dtype) + tf.cast(total, x.dtype)


def test_values_of_variables_without_numbers_or_shape(float64: None) -> None:
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        histories.append(with_layer(Growing).fit(x, y, **FIT, **more).history)
    assert_same_history(histories[1], histories[0])


def test_such_values_that_a_loop_changes() -> None:
    growing = Growing()

    @nano(num_processes=2)
    def change() -> tuple[Any, Any]:
        growing.text.assign("abcd")
        growing.grown.assign(tf.concat([growing.grown.read_value(), [4.0]], 0))
        return growing.text.numpy(), growing.grown.numpy().tolist()

    for length in (4, 5):
        text, grown = change()
        assert text == growing.text.numpy() == b"abcd"
        assert grown == growing.grown.numpy().tolist()
        assert len(grown) == length


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_model_made_under_a_strategy(policy: str) -> None:
    x, y = numbers()
    histories = []
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        for more in ({}, {"num_processes": 2}):
            with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
                model = with_layer(lambda: L.Dense(2))
            histories.append(model.fit(x, y, **FIT, **more).history["loss"])
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    np.testing.assert_allclose(*histories, rtol=2e-2 if policy != "float32" else 1e-5)


def test_an_optimizer_that_new_workers_get(float64: None) -> None:
    """The workers of the call that built it have ended."""
    x, y = numbers()
    losses: list[list[float]] = []
    for size in (None, 2):
        tf.keras.utils.set_random_seed(1)
        dense, optimizer = L.Dense(1), tf.keras.optimizers.Adam(0.05)
        dense.build((None, 3))
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)

        def train(batches: Any, dense: Any, optimizer: Any) -> list[float]:
            found = []
            for rows, targets in batches:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((dense(rows) - targets) ** 2)
                gradients = tape.gradient(loss, dense.trainable_variables)
                optimizer.apply_gradients(zip(gradients, dense.trainable_variables, strict=True))
                found.append(float(loss))
            return found

        run = train if size is None else nano(num_processes=size)(train)
        first = run(batches, dense, optimizer)
        if size is not None:
            warm.end_pool()
        losses.append([*first, *run(batches, dense, optimizer), *run(batches, dense, optimizer)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


class ReadsVariables(L.Layer):  # type: ignore[misc]
    """Reads a dataset of its variables: one is empty, one has no number, two are alike."""

    def __init__(self) -> None:
        super().__init__()
        floatx = tf.keras.backend.floatx()
        values = [[], [float("nan")], [1.0], [1.0]]
        self.read = [tf.Variable(tf.constant(v, floatx), trainable=False) for v in values]
        empty, nan, one, other = self.read

        def row(number: Any) -> Any:
            known = tf.where(tf.math.is_nan(nan), tf.zeros_like(nan), nan)
            return tf.reduce_sum(empty) + known[0] + one[0] + other[0] * 2.0 + one[0] * 0.0

        self.rows = tf.data.Dataset.range(3).map(row)
        other.assign([5.0])

    def call(self, x: Any) -> Any:
        start = tf.zeros([], x.dtype)
        return x * self.rows.reduce(start, lambda total, row: total + row)


def test_a_dataset_of_unusual_variables(float64: None) -> None:
    x, y = numbers()
    histories = []
    for more in ({}, {"num_processes": 2}):
        histories.append(with_layer(ReadsVariables).fit(x, y, **FIT, **more).history)
    assert_same_history(histories[1], histories[0])
