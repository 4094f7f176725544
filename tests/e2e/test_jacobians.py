"""Jacobians of a model's outputs, and models in `tf.vectorized_map`, in a custom training loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf import nano, nano_multiprocessing

pytestmark = pytest.mark.both_generations

WIDTH = 3


def _all(model: Any, x: Any, tape: Any, out: Any) -> Any:
    unconnected = tf.constant(1.0, tf.float64)
    assert tape.jacobian(out, [unconnected]) == [None]
    return tape.jacobian(out, [x, model.trainable_variables[0], unconnected])


def _of_rows(model: Any, x: Any, tape: Any, out: Any) -> Any:
    return tape.batch_jacobian(out, x)


def _per_row(model: Any, x: Any, tape: Any, out: Any) -> Any:
    def gradient(row: Any) -> Any:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(model(row[None]) ** 2)
        return inner.gradient(loss, _variables(model))

    return tf.vectorized_map(gradient, x)


def _outputs_per_row(model: Any, x: Any, tape: Any, out: Any) -> Any:
    return tf.vectorized_map(lambda row: model(row[None]), x)


def _variables(model: Any) -> Any:
    return model.trainable_variables


def _trained(taken: Any, nano: Any, step: Any, in_graph: bool) -> Any:
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(2)])
    model.build((None, WIDTH))
    optimizer = tf.keras.optimizers.SGD(0.1)

    def train_step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=taken is _all) as tape:
                tape.watch(x)
                out = model(x)
            found = taken(model, x, tape, out)
            flat = [each for each in tf.nest.flatten(found) if each is not None]
            loss = tf.add_n([tf.reduce_sum(each**2) for each in flat])
        gradients = outer.gradient(loss, _variables(model))
        pairs = zip(gradients, _variables(model), strict=True)
        optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
        return found

    train_step = step(tf.function(train_step) if in_graph else train_step)

    @nano
    def train() -> Any:
        random = np.random.default_rng(0)
        batches = [tf.constant(random.normal(size=(rows, WIDTH))) for rows in (6, 7, 1)]
        return [tf.nest.map_structure(np.array, train_step(x)) for x in batches]

    return train(), model.get_weights()


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("taken", [_all, _of_rows, _per_row, _outputs_per_row])
def test_as_in_one_process(float64: None, taken: Any, in_graph: bool) -> None:
    expected = _trained(taken, lambda f: f, lambda f: f, in_graph)
    found = _trained(taken, nano(num_processes=2), nano_multiprocessing, in_graph)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        if b.dtype != object:  # None in one process
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
