"""`@nano` and `@nano_multiprocessing` change only the speed."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import io
import linecache
import os
import pathlib
import random
import sys
import time
import types
from typing import Any

import cloudpickle
import loops
import numpy as np
import pytest
import tensorflow as tf
import test_whole_batch_metrics as of_metrics
from loops import cross_entropy, dense, plain_step, plain_train

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.errors import ShippingError
from nanotf.keras import nano, nano_bf16, nano_multiprocessing, nano_multiprocessing_loss
from nanotf.pool import warm
from nanotf.worker import session

L = tf.keras.layers
OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
    "clipped": lambda: tf.keras.optimizers.Adam(0.01, global_clipnorm=0.1),
}


@pytest.fixture(
    scope="module",
    params=["shm", "grpc"],
)
def run_on(request: pytest.FixtureRequest) -> Any:
    """Returns `nano` for two workers on one of the transports."""
    return functools.partial(nano, num_processes=2, transport=request.param)


def _train_both(
    run_on: Any,
    optimizer: Any = OPTIMIZERS["sgd"],
    loss: Any = cross_entropy,
    step: Any = plain_step,
    model: Any = dense,
    data: Any = loops.dataset,
    graph: bool = True,
) -> tuple[Any, Any]:
    """Trains two equal models, in one process and with two workers; they must agree."""
    found, expected = (model(), optimizer()), (model(), optimizer())
    plain = tf.function(step) if graph else step
    theirs = plain_train(expected[0], data(), loss(), expected[1], plain)
    shared = nano_multiprocessing(tf.function(step) if graph else step)
    ours = run_on()(plain_train)(found[0], data(), loss(), found[1], shared)
    np.testing.assert_allclose(ours, theirs, rtol=loops.tolerance())
    loops.assert_same_variables(found[0].variables, expected[0].variables)
    mine, other = loops.variables_of(found[1]), loops.variables_of(expected[1])
    loops.assert_same_variables(mine, other)
    return found, expected


# ------------------------------------------------------------------------------- the numbers
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.both_generations
def test_follows_one_process(run_on: Any, float64: None, optimizer: str) -> None:
    _train_both(run_on, OPTIMIZERS[optimizer])


@pytest.mark.parametrize(("rows", "batch_size"), [(33, 16), (35, 7), (1, 1), (3, 2)])
@pytest.mark.both_generations
def test_every_batch_size(run_on: Any, float64: None, rows: int, batch_size: int) -> None:
    # The last batch of 33 has one row, for two workers.
    _train_both(run_on, data=lambda: loops.dataset(rows, batch_size))


def test_without_a_dataset(run_on: Any, float64: None) -> None:
    """All workers have the same rows, and train on their mean."""
    _train_both(run_on, data=lambda: [loops.rows(12)] * 3)


def test_without_data_or_model(run_on: Any) -> None:
    assert run_on()(nanotf.size)() == 2


@pytest.mark.parametrize("reduction", ["sum", "default"])
@pytest.mark.both_generations
def test_reductions_and_regularizers(run_on: Any, float64: None, reduction: str) -> None:
    options = {} if reduction == "default" else {"reduction": reduction}
    _train_both(
        run_on,
        optimizer=lambda: tf.keras.optimizers.SGD(0.01),
        loss=lambda: cross_entropy(**options),
        model=lambda: dense(regularizer="l2"),
    )


def test_loss_object_that_is_a_ratio_of_the_batch(run_on: Any, float64: None) -> None:
    def cosine(y_true: Any, y_pred: Any) -> Any:
        return tf.keras.losses.CosineSimilarity()(tf.cast(y_true, y_pred.dtype), y_pred[:, 0])

    _train_both(run_on, loss=lambda: cosine)
    if is_keras_3():
        _train_both(run_on, loss=lambda: lambda y, p: tf.keras.losses.Dice()(tf.one_hot(y, 3), p))


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
    _train_both(run_on, loss=lambda: cross_entropy(**none), step=step)


def test_step_without_tf_function(run_on: Any, float64: None) -> None:
    _train_both(run_on, OPTIMIZERS["adam"], graph=False)


@pytest.mark.parametrize("graph", [True, False])
def test_steps_without_the_mark(run_on: Any, float64: None, graph: bool) -> None:
    found, expected = dense(), dense()
    step = tf.function(plain_step) if graph else plain_step
    arguments = loops.dataset(), cross_entropy(), OPTIMIZERS["sgd"](), step
    ours = run_on()(plain_train)(found, *arguments)
    arguments = loops.dataset(), cross_entropy(), OPTIMIZERS["sgd"](), plain_step
    np.testing.assert_allclose(ours, plain_train(expected, *arguments), rtol=1e-10)
    loops.assert_same_variables(found.get_weights(), expected.get_weights())


def test_samples_without_batches(run_on: Any) -> None:
    @run_on()
    def total(data: Any) -> Any:
        return sum(float(tf.reduce_sum(x)) for x in data), len(list(data.take(3)))

    data = tf.data.Dataset.range(5).map(lambda n: tf.cast(n, tf.float32))
    assert total(data) == (10.0, 3)
    assert total(data.batch(2)) == (10.0, 3)


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
    _train_both(run_on, loss=lambda: with_more)
    _train_both(run_on, loss=lambda: of_rows)
    for graph in (True, False):
        _train_both(run_on, loss=lambda: of_batch, graph=graph)


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
    _train_both(run_on, loss=Overlap, data=data)

    def step(inputs: Any, model: Any, loss_object: Any, optimizer: Any) -> Any:
        loss = tf.constant(0.0, tf.float64)
        for _ in tf.range(2):
            loss = plain_step(inputs, model, loss_object, optimizer)
        return loss

    _train_both(run_on, loss=Mean, data=data, step=step)


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

    _train_both(run_on, OPTIMIZERS["sgd"], model=model, data=data)


@pytest.mark.both_generations
def test_accumulation_and_loss_scaling(run_on: Any) -> None:
    if hasattr(tf.keras, "Variable"):  # Keras 3
        _train_both(run_on, lambda: tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
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

    _train_both(run_on, optimizer, model=model)


def test_three_processes(float64: None) -> None:
    try:
        nanotf.plan(3)
    except nanotf.errors.PlacementError as error:
        pytest.skip(f"three workers need three cores: {error}")
    _train_both(functools.partial(nano, num_processes=3))


def test_second_call_continues(run_on: Any, float64: None) -> None:
    found, expected = _train_both(run_on, OPTIMIZERS["adam"])
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


# ------------------------------------------------------------- ways to reach the workers
def test_everything_captured(run_on: Any, float64: None) -> None:
    def both(run: Any, share: Any) -> tuple[list[float], list[Any]]:
        model, optimizer, data, loss_object = (
            dense(), OPTIMIZERS["adam"](), loops.dataset(), cross_entropy()
        )  # fmt: skip

        @share
        @tf.function
        def step(inputs: Any) -> Any:
            return plain_step(inputs, model, loss_object, optimizer)

        @run
        def train(*, epochs: int = 2, scale: float = 1.0) -> list[float]:
            return [scale * float(step(inputs)) for _ in range(epochs) for inputs in data]

        return train(scale=2.0), model.get_weights()

    def as_it_is(function: Any) -> Any:
        return function

    ours, theirs = both(run_on(), nano_multiprocessing), both(as_it_is, as_it_is)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=loops.tolerance())
    loops.assert_same_variables(ours[1], theirs[1])


def test_objects_in_modules(
    run_on: Any, float64: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop reaches them by name and through helpers; unused unpicklable ones stay."""
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("from . import net\n")
    (package / "net.py").write_text(
        "import threading, loops, tensorflow as tf\n"
        "model, lock, batches = loops.dense(), threading.Lock(), loops.dataset()\n"
        "made = {'mean': tf.keras.metrics.Mean()}\n"
        "def forward(x): return model(x, training=True)\n"
    )
    (package / "helpers.py").write_text(
        "from .net import forward\ndef squared(x): return 0.1 * forward(x) ** 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("package_of_mine.net")
    squared = importlib.import_module("package_of_mine.helpers").squared
    model, made, batches, forward = net.model, net.made, net.batches, net.forward
    weights = model.get_weights()

    def program(run: Any, share: Any) -> Any:
        model.set_weights(weights)
        made["mean"].reset_state()
        optimizer, loss_object = tf.keras.optimizers.SGD(0.1), cross_entropy()

        @run
        def train() -> Any:
            @share
            @tf.function
            def step(x: Any, y: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = loss_object(y, forward(x)) + tf.reduce_mean(squared(x))
                variables = model.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
                made["mean"].update_state(loss)
                return loss

            return [step(x, y) for x, y in batches]

        return train(), made["mean"].result().numpy(), model.get_weights()

    _same(run_on, program)
    with pytest.raises(ShippingError, match=r"'package_of_mine\.net', which leads to .*\.model"):
        run_on()(lambda: [net.forward(x) for x, _ in batches])()


def test_a_module_that_workers_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_in_memory")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def double(x): return 2 * x", vars(module))
    double, data = vars(module)["double"], loops.dataset()
    function = nano(num_processes=2)(lambda: float(sum(double(len(x)) for x, _ in data)))
    with pytest.raises(ShippingError, match=r"'made_in_memory', which is not on sys\.path"):
        function()
    cloudpickle.register_pickle_by_value(module)
    try:
        assert function() > 0
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _trainer(run: Any) -> Any:
    """Returns an object that holds all parts of the training, with a method per level.

    Its class is new at every call: in Keras 2 a `tf.function` makes an optimizer's slots only once.
    """

    class Trainer:
        def __init__(self) -> None:
            self.model = dense()
            self.optimizer = tf.keras.optimizers.SGD(0.1)
            self.loss_object = cross_entropy()

        @nano_multiprocessing
        @tf.function
        def step(self, inputs: Any) -> Any:
            return plain_step(inputs, self.model, self.loss_object, self.optimizer)

        @run
        def train(self, data: Any) -> list[float]:
            return [float(self.step(inputs)) for inputs in data]

    return Trainer()


@pytest.mark.thorough
def test_methods(run_on: Any, float64: None) -> None:
    alone, shared = _trainer(lambda f: f), _trainer(run_on())
    theirs = alone.train(loops.dataset())
    np.testing.assert_allclose(shared.train(loops.dataset()), theirs, rtol=loops.tolerance())
    loops.assert_same_variables(shared.model.get_weights(), alone.model.get_weights())


def test_parts_are_the_same_objects(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[Any]:
        tf.keras.utils.set_random_seed(5)
        encoder = tf.keras.Sequential([L.Input((8,)), L.Dense(4, activation="tanh")])
        decoder = tf.keras.Sequential([L.Input((4,)), L.Dense(8)])
        inputs = L.Input((8,))
        both = tf.keras.Model(inputs, decoder(encoder(inputs)))
        optimizer = tf.keras.optimizers.SGD(0.1)
        kernel = encoder.trainable_variables[0]

        @nano_multiprocessing
        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(both(x) - x)) + tf.reduce_mean(
                    tf.square(encoder(x))
                )
            gradients = tape.gradient(loss, both.trainable_variables)
            optimizer.apply_gradients(zip(gradients, both.trainable_variables, strict=True))
            return loss + 0 * tf.reduce_sum(kernel)

        @run
        def train(data: Any) -> Any:
            losses = [float(step(x)) for x, _ in data]
            return losses, encoder, float(tf.reduce_sum(kernel))

        losses, same, total = train(loops.dataset())
        assert same is encoder
        np.testing.assert_allclose(total, np.sum(encoder.get_weights()[0]), rtol=1e-10)
        return [np.array(losses), *both.get_weights()]

    for ours, theirs in zip(both(run_on()), both(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.thorough
def test_two_models_and_optimizers(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[Any]:
        tf.keras.utils.set_random_seed(5)
        generator = tf.keras.Sequential([L.Input((2,)), L.Dense(8)])
        discriminator = tf.keras.Sequential([L.Input((8,)), L.Dense(4, "tanh"), L.Dense(1)])
        optimizers = {"g": tf.keras.optimizers.Adam(0.01), "d": tf.keras.optimizers.Adam(0.02)}
        entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)

        @nano_multiprocessing
        @tf.function
        def step(x: Any) -> dict[str, Any]:
            with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
                fake = discriminator(generator(x[:, :2]))
                real = discriminator(x)
                g_loss = entropy(tf.ones_like(fake), fake)
                d_loss = entropy(tf.ones_like(real), real) + entropy(tf.zeros_like(fake), fake)
            for name, tape, loss, model in (
                ("g", g_tape, g_loss, generator),
                ("d", d_tape, d_loss, discriminator),
            ):
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizers[name].apply_gradients(
                    zip(gradients, model.trainable_variables, strict=True)
                )
            return {"losses": (g_loss, d_loss), "rows": fake[:, 0], "count": tf.size(fake)}

        @run
        def train(data: Any) -> list[Any]:
            return [step(x) for x, _ in data]

        found = tf.nest.flatten(train(loops.dataset()))
        state = loops.variables_of(optimizers["d"])
        return [np.asarray(v) for v in [*found, *generator.get_weights(), *state]]

    ours, theirs = both(run_on()), both(lambda f: f)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.both_generations
def test_metrics_and_validation_steps(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[Any]:
        model, optimizer = dense(), tf.keras.optimizers.SGD(0.1)
        loss_object = cross_entropy()
        mean = tf.keras.metrics.Mean(name="loss")
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        auc = tf.keras.metrics.AUC(num_thresholds=7)

        @nano_multiprocessing
        @tf.function
        def train_step(x: Any, y: Any) -> None:
            loss = plain_step((x, y), model, loss_object, optimizer)
            mean.update_state(loss)
            accuracy.update_state(y, model(x))

        @nano_multiprocessing
        @tf.function
        def test_step(x: Any, y: Any) -> Any:
            outputs = model(x)
            auc.update_state(tf.cast(y > 0, outputs.dtype), tf.sigmoid(outputs[:, 0]))
            return loss_object(y, outputs), outputs

        @run
        def train(data: Any, validation: Any) -> list[Any]:
            numbers: list[Any] = []
            for _ in range(2):
                (mean.reset_state if hasattr(mean, "reset_state") else mean.reset_states)()
                for x, y in data:
                    train_step(x, y)
                numbers += [float(mean.result()), float(accuracy.result())]
                for x, y in validation:
                    loss, outputs = test_step(x, y)
                    numbers += [float(loss), outputs.numpy()]
                numbers.append(float(auc.result()))
            return numbers

        numbers = train(loops.dataset(53), loops.dataset(17, 8, seed=4))
        # The metrics here have the state of all workers, too.
        return [*numbers, float(accuracy.result()), float(auc.result()), float(mean.result())]

    for ours, theirs in zip(both(run_on()), both(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.both_generations
def test_results_of_metrics_in_steps(run_on: Any, float64: None) -> None:
    """They cover all workers, including a worker without a row in the last batch."""

    def program(run: Any, share: Any) -> Any:
        model = dense()
        accuracy, mean = tf.keras.metrics.SparseCategoricalAccuracy(), tf.keras.metrics.Mean()
        largest = of_metrics.Largest()

        @share
        @tf.function
        def step(x: Any, y: Any) -> Any:
            outputs = model(x)
            accuracy.update_state(y, outputs)
            mean.update_state(outputs)
            largest.update_state(tf.one_hot(y, 3, dtype=outputs.dtype), outputs)
            in_branch = accuracy.result() if tf.reduce_sum(y) >= 0 else tf.zeros_like(outputs[0, 0])
            return accuracy.result(), mean.result(), largest.result(), in_branch

        @run
        def train(data: Any) -> Any:
            found = [step(x, y) for x, y in data]
            return found, accuracy.result(), mean.result(), largest.result()

        return train(loops.dataset(35, 17)), float(mean.result())

    _same(run_on, program)


@pytest.mark.both_generations
def test_metrics_that_see_the_whole_batch(run_on: Any, float64: None) -> None:
    def both(run: Any) -> list[float]:
        model = dense()
        metrics = [of_metrics.Largest(), of_metrics.Remembering(), *of_metrics.over_rows()]

        @nano_multiprocessing
        @tf.function
        def test_step(x: Any, y: Any) -> None:
            outputs = model(x)
            for metric in metrics:
                metric.update_state(tf.one_hot(y, 3, dtype=outputs.dtype), outputs)

        @run
        def test(data: Any) -> list[float]:
            for x, y in data:
                test_step(x, y)
            return [float(metric.result()) for metric in metrics]

        # The last batch has one row. The second call continues from the state of the first.
        numbers = test(loops.dataset(41, 8)) + test(loops.dataset(17, 8, seed=4))
        return [*numbers, *(float(metric.result()) for metric in metrics)]

    for ours, theirs in zip(both(run_on()), both(lambda f: f), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


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


def _same(run_on: Any, program: Any) -> None:
    """Asserts that a program does the same with two workers; it takes both decorators."""
    found = tf.nest.flatten(program(run_on(), nano_multiprocessing))
    expected = tf.nest.flatten(program(lambda f: f, lambda f: f))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


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

    _same(run_on, program)


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

    _same(run_on, program)


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

    _same(run_on, program)


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

    _same(run_on, program)


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

    _same(run_on, program)


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


@pytest.mark.both_generations
def test_models_built_by_the_first_step(run_on: Any, float64: None) -> None:
    class Lazy(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = L.Dense(5, activation="tanh")
            self.outer = L.Dense(3)

        def call(self, x: Any) -> Any:
            return self.outer(self.hidden(x))

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        return Lazy()

    if hasattr(tf.keras, "Variable"):  # Keras 3
        _train_both(run_on, OPTIMIZERS["adam"], model=make)
        return
    # Keras 2 draws different initial weights inside and outside a tf.function.
    model, optimizer = make(), OPTIMIZERS["adam"]()
    step = nano_multiprocessing(tf.function(plain_step))
    losses = run_on()(plain_train)(model, loops.dataset(), cross_entropy(), optimizer, step)
    assert losses[-1] < losses[0]
    assert int(optimizer.iterations.numpy()) == 8
    assert model.count_params() == 8 * 5 + 5 + 5 * 3 + 3


@pytest.mark.both_generations
def test_sequential_models_without_an_input(run_on: Any) -> None:
    tf.keras.utils.set_random_seed(2)
    model, optimizer = tf.keras.Sequential([L.Dense(4), L.Dense(3)]), OPTIMIZERS["sgd"]()
    step = nano_multiprocessing(tf.function(plain_step))
    losses = run_on()(plain_train)(model, loops.dataset(), cross_entropy(), optimizer, step)
    assert losses[-1] < losses[0]
    assert model.count_params() == 8 * 4 + 4 + 4 * 3 + 3


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.both_generations
def test_compiled_metrics_are_sent_both_ways(run_on: Any, float64: None, fitted: bool) -> None:
    """An earlier `fit` or the loop builds them; the accuracy is the user's object."""

    def both(run: Any) -> list[Any]:
        model, given = dense(), tf.keras.metrics.SparseCategoricalAccuracy(name="given")
        model.compile(OPTIMIZERS["adam"](), cross_entropy(), metrics=["accuracy", given])
        x, y = loops.rows(30)
        if fitted:
            model.fit(x, y, shuffle=False, verbose=0)

        @nano_multiprocessing
        @tf.function
        def step(x: Any, y: Any) -> Any:
            outputs = model(x)
            model.compute_metrics(x, y, outputs, None)
            return plain_step((x, y), model, cross_entropy(), model.optimizer)

        @run
        def train(data: Any) -> list[float]:
            return [float(step(x, y)) for x, y in data]

        numbers = train(loops.dataset())
        metrics = [getattr(metric, "metrics", None) or [metric] for metric in model.metrics]
        assert any(metric is given for found in metrics for metric in found)
        found = [*numbers, float(given.result())]
        results = model.get_metrics_result()
        found += [float(results["accuracy"]), *model.evaluate(x, y, verbose=0)]
        return [*found, *train(loops.dataset()), float(given.result())]

    np.testing.assert_allclose(both(run_on()), both(lambda f: f), rtol=1e-9)


@pytest.mark.parametrize("built", [True, False])
def test_layers_outside_of_models(run_on: Any, float64: None, built: bool) -> None:
    class Block(L.Layer):  # type: ignore[misc]
        def __init__(self, units: int = 6, **options: Any) -> None:
            super().__init__(**options)
            self.inner = L.Dense(units, activation="tanh")

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "units": 6}

    def both(run: Any) -> list[Any]:
        tf.keras.utils.set_random_seed(1)
        first, last = Block(), L.Dense(3, trainable=False)
        if built:
            last(first(loops.rows(2)[0]))
        optimizer, loss_object = OPTIMIZERS["adam"](), cross_entropy()

        @nano_multiprocessing
        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_object(y, last(first(x)))
            gradients = tape.gradient(loss, first.trainable_variables)
            pairs = zip(gradients, first.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
            return loss

        @run
        def train(data: Any) -> Any:
            return [float(step(x, y)) for x, y in data], first

        losses, same = train(loops.dataset())
        assert same is first
        assert last.get_weights()[0].shape == (6, 3)
        assert not last.trainable_variables
        return [*losses, *train(loops.dataset())[0], *map(np.sum, first.get_weights())]

    ours = both(run_on())
    if built:
        np.testing.assert_allclose(ours, both(lambda f: f), rtol=1e-9)
    else:  # weights made in a worker have other random values
        assert ours[4] < ours[0], "the first batch again"


class Residual(tf.keras.Model):  # type: ignore[misc]
    """A layer without get_config(), with arguments that Keras cannot serialize."""

    def __init__(self, widths: list[int], activation: Any) -> None:
        super().__init__()
        self.hidden = [L.Dense(width) for width in widths]
        self._last = L.Dense(3)
        self.by_name = {"again": self.hidden[-1]}
        self.activation = activation

    def call(self, x: Any) -> Any:
        for layer in self.hidden:
            x = self.activation(layer(x))
        return self._last(x + self.by_name["again"](x))


@pytest.mark.thorough
def test_models_without_configuration(run_on: Any, float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        made = Residual([5, 5], lambda x: tf.tanh(x) * 2)
        made(loops.rows(2)[0])
        return made

    _train_both(run_on, OPTIMIZERS["adam"], model=make)


def test_variables_without_keras(run_on: Any, float64: None) -> None:
    class Line(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.slope = tf.Variable(tf.ones([8, 3], tf.float64))
            self.offset = tf.Variable(tf.zeros([3], tf.float64))

        def __call__(self, x: Any, training: bool = False) -> Any:
            return x @ self.slope + self.offset

        losses = ()

    found, expected = Line(), Line()
    optimizers = tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.SGD(0.1)
    theirs = plain_train(expected, loops.dataset(), cross_entropy(), optimizers[1], plain_step)
    step = nano_multiprocessing(tf.function(plain_step))
    ours = run_on()(plain_train)(found, loops.dataset(), cross_entropy(), optimizers[0], step)
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    loops.assert_same_variables(list(found.variables), list(expected.variables))


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

    _same(run_on, program)


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


def test_functions_typed_into_a_notebook(run_on: Any, float64: None) -> None:
    """Their source is only in the parent's linecache, and AutoGraph needs it."""
    source = """
def step(inputs, model, loss_object, optimizer):
    x, y = inputs
    if tf.reduce_sum(x) > 1e9:  # a branch of the graph
        x = x * 0
    return plain_step((x, y), model, loss_object, optimizer)
"""
    path = "<ipython-input-7-nanotf>"
    cell = {"tf": tf, "plain_step": plain_step, "__name__": "__main__"}
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    try:
        exec(compile(source, path, "exec"), cell)
        _train_both(run_on, step=cell["step"])
    finally:
        del linecache.cache[path]


# --------------------------------------------------------------------------- without workers
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
