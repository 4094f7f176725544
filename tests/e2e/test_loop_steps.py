"""Steps, however they are written, return what they return in one process."""

from __future__ import annotations

import functools
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from compared_loops import OPTIMIZERS, train_both
from compared_loops import run_on as run_on
from loops import cross_entropy, dense, plain_step, plain_train

from nanotf.keras import nano_bf16, nano_multiprocessing


def _partial(step: Any, *objects: Any) -> Any:
    names = ("model", "loss_object", "optimizer")
    return functools.partial(step, **dict(zip(names, objects, strict=True)))


WAYS = {
    "graph above": lambda *objects: _partial(
        tf.function(nano_multiprocessing(plain_step)), *objects
    ),
    "partial above": lambda *objects: _partial(
        nano_multiprocessing(tf.function(plain_step)), *objects
    ),
    "partial below": lambda *objects: nano_multiprocessing(
        tf.function(_partial(plain_step, *objects))
    ),
    "partial alone": lambda *objects: nano_multiprocessing(_partial(plain_step, *objects)),
}


def test_ways_to_write_a_step(run_on: Any, float64: None) -> None:
    def train(data: Any, step: Any, scale: float) -> list[float]:
        return [scale * float(step(inputs)) for inputs in data]

    expected = plain_train(
        dense(), loops.dataset(), cross_entropy(), OPTIMIZERS["sgd"](), plain_step, epochs=1
    )
    for way in WAYS.values():
        step = way(dense(), cross_entropy(), OPTIMIZERS["sgd"]())
        found = run_on()(functools.partial(train, scale=1.0))(loops.dataset(), step)
        np.testing.assert_allclose(found, expected, rtol=loops.tolerance())
    alone = WAYS["graph above"](dense(), cross_entropy(), OPTIMIZERS["sgd"]())
    np.testing.assert_allclose(train(loops.dataset(), alone, 1.0), expected, rtol=1e-9)


def test_step_without_tf_function(run_on: Any, float64: None) -> None:
    train_both(run_on, OPTIMIZERS["adam"], graph=False)


@pytest.mark.parametrize("graph", [True, False])
def test_steps_without_the_mark(run_on: Any, float64: None, graph: bool) -> None:
    found, expected = dense(), dense()
    step = tf.function(plain_step) if graph else plain_step
    arguments = loops.dataset(), cross_entropy(), OPTIMIZERS["sgd"](), step
    ours = run_on()(plain_train)(found, *arguments)
    arguments = loops.dataset(), cross_entropy(), OPTIMIZERS["sgd"](), plain_step
    np.testing.assert_allclose(ours, plain_train(expected, *arguments), rtol=1e-10)
    loops.assert_same_variables(found.get_weights(), expected.get_weights())


def test_decorators_in_other_places(run_on: Any, float64: None) -> None:
    """`@nano` and `@nano_multiprocessing` above each other on the loop, in both orders."""
    arguments = loops.dataset(), cross_entropy()
    expected = plain_train(dense(), *arguments, OPTIMIZERS["sgd"](), plain_step)
    for loop in (
        run_on()(nano_multiprocessing()(plain_train)),
        nano_multiprocessing(run_on()(plain_train)),
    ):
        found = loop(dense(), *arguments, OPTIMIZERS["sgd"](), tf.function(plain_step))
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_decorators_that_have_changed_places(run_on: Any, float64: None) -> None:
    """Each step is a call of its own to the workers: correct, and slow."""
    found, expected = dense(), dense()
    batch, loss_object = next(iter(loops.dataset())), cross_entropy()
    optimizers = OPTIMIZERS["sgd"](), OPTIMIZERS["sgd"]()
    step = run_on()(plain_step)
    loop = nano_multiprocessing(plain_train)
    ours = loop(found, [batch] * 2, loss_object, optimizers[0], step)
    theirs = plain_train(expected, [batch] * 2, loss_object, optimizers[1], plain_step)
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    loops.assert_same_variables(found.get_weights(), expected.get_weights())


def test_a_graph_above_nano_is_refused(run_on: Any) -> None:
    loop = tf.function(run_on()(lambda: tf.constant(1)))
    with pytest.raises(Exception, match=r"Received: a call of .* Write @nano above @tf\.function"):
        loop()


@pytest.mark.parametrize("graph", [True, False])
def test_vectors_as_long_as_one_workers_rows(run_on: Any, float64: None, graph: bool) -> None:
    """Batches of 7, 7, 5 and 1 rows: 4 and 3, 3 and 2, 1 and 0 rows for two workers."""
    factor = tf.Variable(tf.constant(2.0, tf.float64))

    def step(x: Any, y: Any) -> Any:
        means = [tf.reduce_mean(factor * x, axis=0)[:size] for size in (2, 3, 4)]
        return means, tf.range(4), tf.reshape(means[2], [4, 1]), x[:, 0], y > 0, tf.zeros(0)

    def both(run: Any, share: Any) -> list[Any]:
        shared = share(tf.function(step) if graph else step)

        @run
        def train(first: Any, second: Any) -> list[Any]:
            return [shared(x, y) for data in (first, second) for x, y in data]

        return tf.nest.flatten(train(loops.dataset(19, 7), loops.dataset(8, 7)))

    for ours, theirs in zip(
        both(run_on(), nano_multiprocessing), both(lambda f: f, lambda f: f), strict=True
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_numbers_metrics_and_texts_in_a_loop(run_on: Any) -> None:
    """Tests variables as numbers, metrics updated and called outside steps, strings."""

    def both(run: Any) -> Any:
        slope, count = tf.Variable(1.5), tf.Variable(3)
        mean, total = tf.keras.metrics.Mean(), tf.keras.metrics.Sum()
        x = np.arange(11, dtype="float32")
        texts = np.array(["", "a", "bé", "ccc"] * 2 + ["d", "", "e"])
        data = tf.data.Dataset.from_tensor_slices((texts, x)).batch(5)

        @nano_multiprocessing
        @tf.function
        def step(texts: Any, x: Any) -> Any:
            return tf.reduce_mean(slope * x), tf.stack([texts, tf.strings.upper(texts)], axis=1)

        @run
        def train(data: Any) -> Any:
            rows = []
            for texts, x in data:
                loss, doubled = step(texts, x)
                mean.update_state(loss)
                total(loss)
                rows.append(doubled.numpy().tolist())
            numbers = [float(slope), int(count), complex(slope), np.asarray(slope).tolist()]
            return rows, numbers, float(mean.result()), float(total.result())

        return (*train(data), float(mean.result()), float(total.result()), float(mean.count))

    assert both(run_on()) == both(lambda f: f)


def test_bfloat16(run_on: Any) -> None:
    seen = []

    @nano_bf16
    def look(x: Any, y: Any, factor: float) -> Any:
        return x.dtype.name, y.dtype.name, factor

    assert look(tf.ones(2), tf.constant([1]), 2.0) == ("bfloat16", "int32", 2.0)
    assert look(np.ones(2), y=np.array([1], "int32"), factor=2.0)[0] == "bfloat16"

    @nano_multiprocessing
    @nano_bf16
    @tf.function
    def step(x: Any, model: Any, optimizer: Any) -> Any:
        seen.append(x.dtype.name)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(x), tf.float32) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, seen[-1] == "bfloat16"

    @run_on()
    def train(model: Any, data: Any, optimizer: Any) -> list[Any]:
        return [step(x, model, optimizer) for x, _ in data]

    found = train(dense(), loops.dataset(), tf.keras.optimizers.SGD(0.1))
    assert [bool(was_cast) for _, was_cast in found] == [True] * 4
    assert float(found[-1][0]) < float(found[0][0])


def test_bfloat16_above_a_step(run_on: Any) -> None:
    factor = tf.Variable(2.0)

    @nano_bf16
    @nano_multiprocessing
    @tf.function
    def step(x: Any) -> Any:
        return tf.cast(factor, x.dtype) * x[:, 0]

    @run_on()
    def train(data: Any) -> list[Any]:
        return [step(x) for x, _ in data]

    assert [rows.dtype.name for rows in train(loops.dataset())] == ["bfloat16"] * 4
