"""Datasets, iterators and generators of a loop are read once, however they are read."""

from __future__ import annotations

from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from compared_loops import assert_follows_one_process, train_both
from compared_loops import run_on as run_on
from loops import cross_entropy, dense, plain_step

from nanotf.keras import nano_multiprocessing


def test_ways_to_read_a_dataset(run_on: Any, float64: None) -> None:
    model, optimizer, loss_object = dense(), tf.keras.optimizers.SGD(0.1), cross_entropy()
    alone, other = dense(), tf.keras.optimizers.SGD(0.1)
    step = nano_multiprocessing(tf.function(plain_step))

    def train(data: Any, step: Any, model: Any, optimizer: Any, pairs: Any) -> list[float]:
        found = []
        iterator = iter(data)
        for _ in range(2):
            found.append(float(step(next(iterator), model, loss_object, optimizer)))
        for number, inputs in enumerate(data):  # while the first iterator continues
            if number == 2:
                break
            found.append(float(step(inputs, model, loss_object, optimizer)))
            found.append(float(step(next(iterator), model, loss_object, optimizer)))
        for x, y in data.skip(1).map(lambda x, y: (2 * x, y)).take(2):
            found.append(float(step((x, y), model, loss_object, optimizer)))
        for inputs in pairs:
            found.append(float(step(inputs, model, loss_object, optimizer)))
        return [*found, float(len(data))]

    def generator() -> Any:
        for start in range(0, 30, 10):
            x, y = loops.rows(30)
            yield x[start : start + 10], y[start : start + 10]

    data = loops.dataset(70)
    ours = run_on()(train)(data, step, model, optimizer, generator())
    theirs = train(data, plain_step, alone, other, generator())
    np.testing.assert_allclose(ours, theirs, rtol=loops.tolerance())
    assert model.get_weights()[0].shape == (8, 6)


@pytest.mark.parametrize("stop_early", [False, True])
def test_a_fresh_iterator_for_every_call(run_on: Any, stop_early: bool) -> None:
    factor = tf.Variable(1.0)

    @nano_multiprocessing
    def step(x: Any) -> Any:
        return factor * tf.reduce_mean(tf.cast(x, tf.float32))

    @run_on()
    def train(batches: Any) -> list[float]:
        found = []
        for x in batches:
            found.append(float(step(x)))
            if stop_early:
                break
        return found

    for kind in (iter, lambda data: (batch.numpy() for batch in data)):
        for call in range(3):
            data = tf.data.Dataset.range(10 * call, 10 * call + 8).batch(4)
            expected = [10 * call + 1.5, 10 * call + 5.5]
            assert train(kind(data)) == expected[: 1 if stop_early else 2]


@pytest.mark.parametrize("graph", [True, False])
def test_steps_that_read_their_batch(run_on: Any, float64: None, graph: bool) -> None:
    """Batches of 17, 17 and 1 rows. Only steps without a graph read generators."""

    def program(run: Any, share: Any) -> Any:
        model, optimizer, loss_object = dense(), tf.keras.optimizers.SGD(0.1), cross_entropy()
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

        def step(iterator: Any) -> Any:
            x, y = next(iterator)
            loss = plain_step((x, y), model, loss_object, optimizer)
            accuracy.update_state(y, model(x))
            return (loss, y) if graph else (float(loss), np.asarray(y), loss.numpy())

        step = share(tf.function(step) if graph else step)

        @run
        def train(data: Any, iterator: Any) -> Any:
            found = [step(iterator), step(iterator)]
            begun = iter(data)
            return [*found, *[step(begun) for _ in range(3)], step(iterator), accuracy.result()]

        data = loops.dataset(35, 17)
        found = train(data, iter(data) if graph else ((x.numpy(), y.numpy()) for x, y in data))
        return found, model.get_weights()

    assert_follows_one_process(run_on, program)


def test_datasets_derived_inside(run_on: Any, float64: None) -> None:
    def program(run: Any, share: Any) -> Any:
        model, optimizer, loss_object = dense(), tf.keras.optimizers.SGD(0.1), cross_entropy()
        step = share(tf.function(plain_step))

        @tf.function
        def epoch(data: Any) -> Any:
            total = tf.constant(0.0, tf.float64)
            for inputs in data.unbatch().batch(5).take(4):
                total += step(inputs, model, loss_object, optimizer)
            return total

        @run
        def train(data: Any, samples: Any) -> Any:
            sample = tf.data.Dataset.sample_from_datasets
            derived = [
                data.unbatch().filter(lambda x, y: y > 0).batch(5),
                data.shuffle(10, seed=4),
                data.map(lambda x, y: (x - tf.reduce_mean(x), y)).take(2).prefetch(1),
                data.concatenate(data.skip(1)).enumerate().map(lambda i, batch: batch),
                samples.shuffle(40, seed=1).batch(6, drop_remainder=True),
                sample([data, data.skip(1)], weights=[0.5, 0.5], seed=3),
                sample([samples, samples.skip(20)], seed=4).batch(7).take(4),
                sample([data, tf.data.Dataset.from_tensors(loops.rows(9))], seed=5),
            ]
            rows = [step(rows, model, loss_object, optimizer) for d in derived for rows in d]
            return [*rows, epoch(data), epoch(data)]

        samples = tf.data.Dataset.from_tensor_slices(loops.rows(35))
        return train(loops.dataset(35, 17), samples), model.get_weights()

    assert_follows_one_process(run_on, program)


def test_loop_in_one_graph(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[Any]:
        model, optimizer, loss_object = dense(), tf.keras.optimizers.SGD(0.1), cross_entropy()

        @nano_multiprocessing
        def step(inputs: Any) -> Any:
            return plain_step(inputs, model, loss_object, optimizer)

        @tf.function
        def epoch(data: Any) -> Any:
            total, steps = tf.constant(0.0, tf.float64), 0
            for inputs in data:
                if steps > 2:
                    break
                total += step(inputs)
                steps += 1
            return total / tf.cast(steps, tf.float64)

        @run
        def train(data: Any) -> list[float]:
            return [float(epoch(data)) for _ in range(2)]

        return [train(loops.dataset(50, 12)), *model.get_weights()]

    for ours, theirs in zip(both(run_on()), both(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_generators_continue(run_on: Any) -> None:
    factor = tf.Variable(1.0)

    @nano_multiprocessing
    def step(x: Any) -> Any:
        return factor * tf.reduce_mean(tf.cast(x, tf.float32))

    @run_on()
    def train(batches: Any) -> list[float]:
        return [float(step(next(batches))) for _ in range(3)]

    for data in (
        iter(tf.data.Dataset.range(80).batch(4)),
        (np.arange(4) + n for n in range(0, 80, 4)),
    ):
        assert train(data) == [1.5, 5.5, 9.5]
        assert train(data) == [13.5, 17.5, 21.5]
        assert next(data)[0] >= 24, "not closed, and read some batches ahead"


def test_generator_datasets_count_every_row(run_on: Any) -> None:
    weight = tf.Variable(0.0)
    optimizer = tf.keras.optimizers.SGD(0.0)

    def numbers() -> Any:
        yield from np.arange(37, dtype="float32")

    data = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], "float32"))
    data = data.shuffle(37, seed=3).batch(5)

    @nano_multiprocessing
    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weight * x)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return x

    @run_on()
    def collect(data: Any) -> list[Any]:
        return [step(x).numpy() for x in data]

    found = collect(data)
    assert [len(batch) for batch in found] == [5] * 7 + [2]
    assert sorted(np.concatenate(found)) == list(range(37))


def test_samples_without_batches(run_on: Any) -> None:
    @run_on()
    def total(data: Any) -> Any:
        return sum(float(tf.reduce_sum(x)) for x in data), len(list(data.take(3)))

    data = tf.data.Dataset.range(5).map(lambda n: tf.cast(n, tf.float32))
    assert total(data) == (10.0, 3)
    assert total(data.batch(2)) == (10.0, 3)


def test_without_a_dataset(run_on: Any, float64: None) -> None:
    """All workers have the same rows, and train on their mean."""
    train_both(run_on, data=lambda: [loops.rows(12)] * 3)
