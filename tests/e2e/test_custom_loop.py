"""`@nano` and `@nano_multiprocessing` change only the speed."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import io
import os
import random
import sys
import time
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from compared_loops import OPTIMIZERS, assert_follows_one_process, train_both
from compared_loops import run_on as run_on
from loops import cross_entropy, dense, plain_step, plain_train

import nanotf
from nanotf.keras import nano, nano_multiprocessing
from nanotf.pool import warm
from nanotf.worker import session

L = tf.keras.layers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.both_generations
def test_follows_one_process(run_on: Any, float64: None, optimizer: str) -> None:
    train_both(run_on, OPTIMIZERS[optimizer])


@pytest.mark.parametrize(("rows", "batch_size"), [(33, 16), (35, 7), (1, 1), (3, 2)])
@pytest.mark.both_generations
def test_every_batch_size(run_on: Any, float64: None, rows: int, batch_size: int) -> None:
    # The last batch of 33 has one row, for two workers.
    train_both(run_on, data=lambda: loops.dataset(rows, batch_size))


def test_without_data_or_model(run_on: Any) -> None:
    assert run_on()(nanotf.size)() == 2


def test_three_processes(float64: None) -> None:
    try:
        nanotf.plan(3)
    except nanotf.errors.PlacementError as error:
        pytest.skip(f"three workers need three cores: {error}")
    train_both(functools.partial(nano, num_processes=3))


def test_second_call_continues(run_on: Any, float64: None) -> None:
    found, expected = train_both(run_on, OPTIMIZERS["adam"])
    step = nano_multiprocessing(tf.function(plain_step))
    train = run_on()(plain_train)
    for _ in range(2):
        ours = train(found[0], loops.dataset(), cross_entropy(), found[1], step)
        theirs = plain_train(
            expected[0], loops.dataset(), cross_entropy(), expected[1], tf.function(plain_step)
        )
        np.testing.assert_allclose(ours, theirs, rtol=loops.tolerance())
    # And in this process, from the state of both.
    ours = plain_train(found[0], loops.dataset(), cross_entropy(), found[1], plain_step)
    theirs = plain_train(expected[0], loops.dataset(), cross_entropy(), expected[1], plain_step)
    np.testing.assert_allclose(ours, theirs, rtol=loops.tolerance())


@pytest.mark.thorough
def test_a_rank_that_begins_a_call_later(run_on: Any) -> None:
    """Rank 0 asks for batches, which reach rank 1 before it has begun the call.

    Workers collect garbage after every `session.ORDERS_PER_COLLECTION` calls; one worker takes
    longer.
    """

    def slow(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            time.sleep(0.5)

    @run_on()
    def total(data: Any, make_slow: bool) -> list[float]:
        if make_slow and os.environ.get("NANOTF_RANK") == "1":
            gc.callbacks.append(slow)
        return [float(add(x)) for x, _ in data]

    @nano_multiprocessing
    @tf.function
    def add(x: Any) -> Any:
        return factor * tf.reduce_mean(x)

    factor = tf.Variable(2.0)
    try:
        first = total(loops.dataset(), True)
        for _ in range(session.ORDERS_PER_COLLECTION):
            np.testing.assert_allclose(total(loops.dataset(), False), first, rtol=1e-6)
    finally:
        warm.end_pool()


@pytest.mark.both_generations
def test_batch_normalization_and_dropout(run_on: Any, float64: None) -> None:
    """Statistics of the whole batch, and the masks of one process."""

    def model() -> Any:
        tf.keras.utils.set_random_seed(2)
        layers = [L.Dense(6), L.BatchNormalization(), L.Dropout(0.5), L.GaussianNoise(0.1)]
        return tf.keras.Sequential([L.Input((8,)), *layers, L.Dense(3)])

    def program(run: Any, share: Any) -> Any:
        made, optimizer, step = model(), OPTIMIZERS["sgd"](), share(tf.function(plain_step))
        tf.random.set_seed(4)
        return (
            run(plain_train)(made, loops.dataset(33), cross_entropy(), optimizer, step),
            made.get_weights(),
        )

    assert_follows_one_process(run_on, program)


@pytest.mark.both_generations
def test_random_numbers_are_alike_on_all_workers(run_on: Any) -> None:
    model, optimizer = dense(), tf.keras.optimizers.SGD(0.1)
    step = nano_multiprocessing(tf.function(plain_step))

    def train(data: Any, loss_object: Any) -> list[float]:
        found = []
        for inputs in data:
            if random.random() < 0.5:
                step(inputs, model, loss_object, optimizer)
            found.append(random.random() + np.random.rand())
        return found

    random.seed(5)
    np.random.seed(5)
    theirs, following = train(loops.dataset(), cross_entropy()), random.random()
    random.seed(5)
    np.random.seed(5)
    assert run_on()(train)(loops.dataset(), cross_entropy()) == theirs
    assert random.random() == following


@pytest.mark.thorough
def test_a_logger_that_outlives_its_call(run_on: Any) -> None:
    """Its stream belongs to the first call; later jobs' text also reaches this process."""
    model, optimizer = dense(), tf.keras.optimizers.SGD(0.1)
    step = nano_multiprocessing(tf.function(plain_step))

    @run_on()
    def train(data: Any, loss_object: Any) -> None:
        builtins.left_behind = sys.stdout  # type: ignore[attr-defined]
        for inputs in data:
            step(inputs, model, loss_object, optimizer)

    def loss(y_true: Any, y_pred: Any) -> Any:
        def log(value: Any) -> Any:
            if os.environ.get("NANOTF_RANK") == "0":
                builtins.left_behind.write("from a later job\n")  # type: ignore[attr-defined]
                builtins.left_behind.flush()  # type: ignore[attr-defined]
            return value

        logged = tf.numpy_function(log, [y_pred], y_pred.dtype)
        logged.set_shape(y_pred.shape)
        return tf.reduce_mean(y_pred + 0.0 * logged, axis=-1)

    train(loops.dataset(), cross_entropy())
    model = nanotf.accelerate(model)
    model.compile("sgd", loss)
    transport = run_on.keywords["transport"]
    x, y = loops.rows(16)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        model.fit(x, y, verbose=0, num_processes=2, transport=transport)
    assert "from a later job" in out.getvalue()


class Embedded(tf.keras.Model):  # type: ignore[misc]
    """Looks up words, and positions that are constants of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.words = L.Embedding(40, 4)
        self.kinds = L.Embedding(3, 4)
        self.places = L.Embedding(6, 4)

    def call(self, x: Any) -> Any:
        return self.words(x) + self.kinds(tf.zeros_like(x)) + self.places(tf.range(6)[tf.newaxis])


def test_exchanges_of_constants(run_on: Any) -> None:
    """TensorFlow must not compute them before the step: workers would wait for each other."""

    def train(batches: list[Any]) -> list[float]:
        tf.keras.utils.set_random_seed(1)
        model = Embedded()
        model(batches[0])
        optimizer = tf.keras.optimizers.SGD(0.1)

        @tf.function
        def step(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(batch) ** 2)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return [float(step(batch)) for batch in batches]

    x = np.random.default_rng(0).integers(0, 40, (14, 6))
    batches = [x[:8], x[8:]]
    np.testing.assert_allclose(run_on()(train)(batches), train(batches), rtol=1e-5)


def test_without_nano_nothing_happens() -> None:
    model, optimizer = dense(), tf.keras.optimizers.SGD(0.1)
    step = nano_multiprocessing(tf.function(plain_step))
    plain = plain_train(dense(), loops.dataset(), cross_entropy(), OPTIMIZERS["sgd"](), plain_step)
    found = plain_train(model, loops.dataset(), cross_entropy(), optimizer, step)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    for count in (None, 1):
        assert nano(num_processes=count)(lambda x: x + 1)(1) == 2
    assert nanotf.worker_pids() == () or len(nanotf.worker_pids()) == 2
    assert (nanotf.rank(), nanotf.size(), nanotf.is_chief()) == (0, 1, True)
    assert nanotf.get_strategy() is tf.distribute.get_strategy()
    assert step.__name__ == "plain_step"
