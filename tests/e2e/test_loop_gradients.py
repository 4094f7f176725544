"""Losses, gradients and optimizers of a loop are those of the global batch."""

from __future__ import annotations

import functools
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from compared_loops import OPTIMIZERS, assert_follows_one_process, train_both
from compared_loops import run_on as run_on
from loops import cross_entropy, dense, plain_step, plain_train

from nanotf.compat.versions import is_keras_3
from nanotf.keras import nano_multiprocessing, nano_multiprocessing_loss

L = tf.keras.layers


@pytest.mark.parametrize("reduction", ["sum", "default"])
@pytest.mark.both_generations
def test_reductions_and_regularizers(run_on: Any, float64: None, reduction: str) -> None:
    options = {} if reduction == "default" else {"reduction": reduction}
    train_both(
        run_on,
        optimizer=lambda: tf.keras.optimizers.SGD(0.01),
        loss=lambda: cross_entropy(**options),
        model=lambda: dense(regularizer="l2"),
    )


def test_loss_object_that_is_a_ratio_of_the_batch(run_on: Any, float64: None) -> None:
    def cosine(y_true: Any, y_pred: Any) -> Any:
        return tf.keras.losses.CosineSimilarity()(tf.cast(y_true, y_pred.dtype), y_pred[:, 0])

    train_both(run_on, loss=lambda: cosine)
    if is_keras_3():
        train_both(run_on, loss=lambda: lambda y, p: tf.keras.losses.Dice()(tf.one_hot(y, 3), p))


def test_no_reduction(run_on: Any, float64: None) -> None:
    def step(inputs: Any, model: Any, loss_object: Any, optimizer: Any) -> Any:
        x, y = inputs
        with tf.GradientTape() as tape:
            values = loss_object(y, model(x, training=True))
            loss = tf.reduce_mean(values * tf.cast(1 + y % 2, values.dtype))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    none = {"reduction": "none"}
    train_both(run_on, loss=lambda: cross_entropy(**none), step=step)


def test_loss_of_a_plain_function(run_on: Any, float64: None) -> None:
    @nano_multiprocessing_loss
    def of_rows(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.one_hot(y_true, 3, dtype=y_pred.dtype) - y_pred), axis=-1)

    @nano_multiprocessing_loss(reduce_retracing=True)
    def of_batch(y_true: Any, y_pred: Any) -> Any:
        assert tf.inside_function()  # even if the step is not, here and in workers
        errors = tf.abs(tf.one_hot(y_true, 3, dtype=y_pred.dtype) - y_pred)
        return tf.reduce_sum(errors**2) / tf.reduce_sum(errors)

    @nano_multiprocessing_loss()
    def weighted(y_true: Any, y_pred: Any, classes: Any, sample_weight: Any = None) -> Any:
        errors = tf.reduce_sum(classes * (tf.one_hot(y_true, 3, dtype=y_pred.dtype) - y_pred) ** 2)
        weights = tf.cast(sample_weight, y_pred.dtype)
        return errors / tf.reduce_sum(weights * tf.reduce_sum(tf.abs(y_pred), axis=-1))

    @nano_multiprocessing_loss()
    def of_one(y_pred: Any) -> Any:
        return tf.reduce_sum(y_pred**2) / tf.reduce_sum(tf.abs(y_pred))

    def with_more(y: Any, outputs: Any) -> Any:
        classes = np.array([1.0, 2.0, 3.0])
        return weighted(y, outputs, classes, sample_weight=1 + y) + of_one(outputs)

    y = loops.rows(4)[1]
    assert of_rows(y, np.zeros((4, 3))).shape == ()
    train_both(run_on, loss=lambda: with_more)
    train_both(run_on, loss=lambda: of_rows)
    for graph in (True, False):
        train_both(run_on, loss=lambda: of_batch, graph=graph)


@pytest.mark.thorough
def test_loss_objects_that_return_a_number_for_the_batch(run_on: Any, float64: None) -> None:
    class Overlap(tf.keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            found, wanted = tf.nn.softmax(y_pred)[:, 1], tf.cast(y_true > 0, y_pred.dtype)
            total = tf.reduce_sum(wanted) + tf.reduce_sum(found)
            return 1 - 2 * tf.reduce_sum(wanted * found) / total

    class Mean(tf.keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype)[:, None] - y_pred))

    data = functools.partial(loops.dataset, 35, 17)
    train_both(run_on, loss=Overlap, data=data)

    def step(inputs: Any, model: Any, loss_object: Any, optimizer: Any) -> Any:
        loss = tf.constant(0.0, tf.float64)
        for _ in tf.range(2):
            loss = plain_step(inputs, model, loss_object, optimizer)
        return loss

    train_both(run_on, loss=Mean, data=data, step=step)


def test_losses_outside_steps(run_on: Any) -> None:
    """Every worker computes the whole loss; Keras 2 refuses this, as under tf.distribute."""
    if not is_keras_3():
        pytest.skip("Keras 2 refuses it")
    (x, y), model, loss_object = loops.rows(30), dense(), cross_entropy()

    @run_on()
    def evaluate(model: Any, data: Any) -> tuple[float, float]:
        return float(loss_object(y, model(x))), float(tf.keras.losses.MeanSquaredError()(x, x + 1))

    ours = evaluate(model, loops.dataset())
    np.testing.assert_allclose(ours, [float(loss_object(y, model(x))), 1.0], rtol=1e-6)


@pytest.mark.both_generations
def test_sparse_gradients(run_on: Any, float64: None) -> None:
    def model() -> Any:
        tf.keras.utils.set_random_seed(3)
        return tf.keras.Sequential(
            [L.Input((4,), dtype="int32"), L.Embedding(11, 5), L.Flatten(), L.Dense(3)]
        )

    def data() -> Any:
        draw = np.random.default_rng(0)
        ids, y = draw.integers(0, 11, (37, 4)).astype("int32"), draw.integers(0, 3, 37)
        return tf.data.Dataset.from_tensor_slices((ids, y)).batch(8)

    train_both(run_on, OPTIMIZERS["sgd"], model=model, data=data)


@pytest.mark.both_generations
def test_gradients_are_those_of_the_global_batch(run_on: Any, float64: None) -> None:
    """Tests gradients accumulated in variables, clipped, and in a loss, over uneven shares."""

    def program(run: Any, share: Any) -> Any:
        model, loss_object = dense(), cross_entropy()
        optimizers = [tf.keras.optimizers.SGD(0.1) for _ in range(3)]
        weights = model.trainable_variables
        sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]
        factor = tf.Variable(tf.constant(0.1, tf.float64))

        @share
        @tf.function
        def accumulate(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_object(y, model(x))
            for total, gradient in zip(sums, tape.gradient(loss, weights), strict=True):
                total.assign_add(gradient)
            return {"loss": loss, "label": (y[:, None], tf.shape(x)[0])}

        @share
        @tf.function
        def apply() -> None:
            optimizers[0].apply_gradients(zip(sums, weights, strict=True))
            for total in sums[:-1]:
                total.assign(tf.zeros_like(total))

        @share
        @tf.function
        def clip(x: Any, y: Any) -> Any:
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape() as tape:
                    loss = factor * loss_object(y, model(x))
                gradients = tape.gradient(loss, [*weights, factor])
                norm = tf.linalg.global_norm(gradients)
                loss += norm
            factor.assign_sub(0.1 * gradients[-1])
            clipped, _ = tf.clip_by_global_norm(gradients[:-1], 0.05)
            optimizers[1].apply_gradients(zip(clipped, weights, strict=True))
            second = outer.gradient(loss, weights)
            optimizers[2].apply_gradients(zip(second, weights, strict=True))
            return loss, norm

        @run
        def train(data: Any) -> Any:
            found = []
            for number, (x, y) in enumerate(data):
                found += [accumulate(x, y), clip(x, y)]
                if number % 2:
                    apply()
            return found

        found = train(loops.dataset(52, 17))
        return found, [v.numpy() for v in (*weights, *sums, factor)]

    assert_follows_one_process(run_on, program)


@pytest.mark.parametrize("graph", [True, False])
def test_gradients_that_a_step_returns(run_on: Any, float64: None, graph: bool) -> None:
    """Gradients with as many rows as a worker's share, 8; another step applies them."""

    def program(run: Any, share: Any) -> Any:
        model, loss_object = dense(), cross_entropy()
        optimizer = tf.keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        weights = model.trainable_variables

        def compute(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_object(y, model(x))
            return loss, tape.gradient(loss, weights)

        def apply(gradients: Any) -> None:
            optimizer.apply_gradients(zip(gradients, weights, strict=True))

        first, second = (share(tf.function(f) if graph else f) for f in (compute, apply))

        @run
        def train(data: Any) -> Any:
            found = []
            for x, y in data:
                found.append(first(x, y))
                second(found[-1][1])
            return found

        return train(loops.dataset(47, 16)), model.get_weights()

    assert_follows_one_process(run_on, program)


@pytest.mark.parametrize("graph", [True, False])
def test_gradients_of_losses_per_row(run_on: Any, float64: None, graph: bool) -> None:
    """TensorFlow differentiates the sum over rows. Means with as many elements are no rows."""

    def program(run: Any, share: Any) -> Any:
        model, loss_object = dense(), cross_entropy(reduction="none")
        optimizer, weights = tf.keras.optimizers.SGD(0.01), model.trainable_variables

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape() as tape:
                    outputs = model(x)
                    losses = loss_object(y, outputs)
                    penalty = 0.1 * tf.reduce_sum(weights[0] ** 2)
                found = tape.gradient([losses, penalty], weights)
                means = tf.reduce_mean(outputs, axis=0)
            of_means = outer.gradient(means, weights)
            with tf.GradientTape() as tape:
                second = loss_object(y, model(x))
            seeded = tape.gradient(second, weights, output_gradients=2.0 * tf.ones_like(second))
            second_order = outer.gradient(found, weights, output_gradients=weights)
            for gradients in (found, seeded):
                optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return (
                losses,
                [tf.reduce_sum(g**2) for g in [*found, *of_means, *seeded]],
                [tf.reduce_sum(g**2) for g in second_order if g is not None],
            )

        step = share(tf.function(step) if graph else step)

        @run
        def train(data: Any) -> Any:
            return [step(x, y) for x, y in data]

        return train(loops.dataset(8, 5)), [v.numpy() for v in weights]

    assert_follows_one_process(run_on, program)


@pytest.mark.both_generations
def test_optimizers_inside_steps(run_on: Any, float64: None) -> None:
    """Tests a branch, a graph loop and a function; one worker has no row of the last batch."""

    def program(run: Any, share: Any) -> Any:
        model, loss_object = dense(), cross_entropy()
        optimizers = [OPTIMIZERS["clipped"]() for _ in range(3)]
        weights = model.trainable_variables
        sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]
        count = tf.Variable(0, trainable=False)
        for optimizer in optimizers:
            optimizer.build(weights)  # in a branch it could not make its slots

        def gradients(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_object(y, model(x))
            return loss, tape.gradient(loss, weights)

        @share
        @tf.function
        def step(x: Any, y: Any) -> Any:
            @tf.function
            def update() -> Any:
                loss, found = gradients(x, y)
                optimizers[2].apply_gradients(zip(found, weights))  # noqa: B905 - AutoGraph
                return loss

            loss, found = gradients(x, y)
            for total, gradient in zip(sums, found):  # noqa: B905 - AutoGraph lacks `strict`
                total.assign_add(gradient)
            count.assign_add(1)
            if count % 2 == 0:
                optimizers[0].apply_gradients(zip(sums, weights))  # noqa: B905
                for total in sums:
                    total.assign(tf.zeros_like(total))
            for _ in tf.range(2):
                loss, found = gradients(x, y)
                optimizers[1].apply_gradients(zip(found, weights))  # noqa: B905
            return loss, update()

        @run
        def train(data: Any) -> Any:
            return [step(x, y) for x, y in data]

        found = train(loops.dataset(35, 17))
        counts = [int(optimizer.iterations.numpy()) for optimizer in optimizers]
        return found, counts, [v.numpy() for v in weights]

    assert_follows_one_process(run_on, program)


@pytest.mark.both_generations
def test_accumulation_and_loss_scaling(run_on: Any) -> None:
    if hasattr(tf.keras, "Variable"):  # Keras 3
        train_both(run_on, lambda: tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    model, step = dense(), nano_multiprocessing(tf.function(plain_step))
    before = model.get_weights()
    losses = run_on()(plain_train)(model, loops.dataset(), cross_entropy(), optimizer, step)
    assert np.isfinite(losses).all()
    assert not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.thorough
def test_variables_without_weight_decay(run_on: Any, float64: None) -> None:
    made = []

    def model() -> Any:
        made.append(dense())
        return made[-1]

    def optimizer() -> Any:
        result = tf.keras.optimizers.AdamW(0.01, weight_decay=0.5)
        result.exclude_from_weight_decay(var_list=[made[-1].layers[-1].kernel])
        return result

    train_both(run_on, optimizer, model=model)
