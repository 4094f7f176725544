"""`fit(num_processes=2)` gives the numbers of `fit()`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, fit_both, small_cnn, weights

from nanotf.keras import Model, Sequential
from nanotf.parent.reading.shuffle_orders import Orders, OrderSeed

L = tf.keras.layers


# Rows and batch size: full batches; a short last batch; a last batch of one row, fewer than
# workers; a single batch; batches of one row each; a batch larger than all rows.
SIZES = [(200, 50), (210, 50), (201, 50), (50, 50), (3, 1), (30, 64)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "batch_size"),
    [
        pytest.param(*size, marks=pytest.mark.thorough if size in [(200, 50), (50, 50)] else ())
        for size in SIZES
    ],
)
@pytest.mark.both_generations
def test_arrays_float64(float64: None, rows: int, batch_size: int) -> None:
    x, y = digits(rows)
    fit_both(small_cnn, x=x, y=y, batch_size=batch_size)


def test_arrays_float32() -> None:
    x, y = digits(601)
    fit_both(small_cnn, x=x, y=y, batch_size=50, epochs=3, validation_split=0.2)


@pytest.mark.thorough
def test_default_batch_size(float64: None) -> None:
    x, y = digits(70)
    fit_both(small_cnn, x=x, y=y)


def test_two_processes_one_process_and_two_again(float64: None) -> None:
    x, y = digits(130)
    both = {"x": x, "y": y, "batch_size": 50, "verbose": 0}
    found, expected = (small_cnn(tf.keras.optimizers.Adam(0.01)) for _ in range(2))
    for processes in (2, None, 2):
        history = found.fit(**both, epochs=1, num_processes=processes)
        assert_same_history(history.history, expected.fit(**both, epochs=1).history)
    assert_same_state(found, expected)


@pytest.mark.both_generations
def test_validation_data_with_weights(float64: None) -> None:
    x, y = digits(301)
    w = weights(301)
    fit_both(
        lambda: small_cnn(weighted=True),
        x=x[:200],
        y=y[:200],
        sample_weight=w[:200],
        batch_size=50,
        validation_data=(x[200:], y[200:], w[200:]),
    )


def test_validation_batches_steps_and_frequency(float64: None) -> None:
    x, y = digits(300)
    fit_both(
        small_cnn,
        x=x[:150],
        y=y[:150],
        batch_size=50,
        epochs=4,
        validation_data=(x[150:], y[150:]),
        validation_batch_size=40,
        validation_steps=2,
        validation_freq=2,
    )


@pytest.mark.both_generations
def test_validation_split(float64: None) -> None:
    x, y = digits(201)
    fit_both(small_cnn, x=x, y=y, batch_size=50, validation_split=0.25)


def test_sample_weight(float64: None) -> None:
    x, y = digits(201)
    # Consecutive rows of weight zero: the weights of a worker's share may all be zero.
    w = weights(201)
    w[:30] = 0
    fit_both(lambda: small_cnn(weighted=True), x=x, y=y, sample_weight=w, batch_size=50)


def test_initial_epoch(float64: None) -> None:
    x, y = digits(100)
    fit_both(small_cnn, x=x, y=y, batch_size=50, initial_epoch=3, epochs=5)


def test_steps_per_epoch_of_arrays(float64: None) -> None:
    x, y = digits(400)
    fit_both(small_cnn, x=x, y=y, batch_size=50, steps_per_epoch=3)


def _dataset(x: Any, y: Any, batch_size: int = 50) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


@pytest.mark.parametrize(("rows", "batch_size"), [(200, 50), (201, 50), (3, 1)])
def test_dataset(float64: None, rows: int, batch_size: int) -> None:
    x, y = digits(rows)
    fit_both(small_cnn, x=_dataset(x, y, batch_size))


def test_dataset_with_weights_and_validation(float64: None) -> None:
    x, y = digits(251)
    weighted = tf.data.Dataset.from_tensor_slices((x, y, weights(251))).batch(50)
    validation = _dataset(x[:101], y[:101])
    fit_both(lambda: small_cnn(weighted=True), x=weighted, validation_data=validation)


@pytest.mark.thorough
def test_dataset_repeated_with_steps(float64: None) -> None:
    x, y = digits(130)
    # Three steps of each epoch: the data continue from one epoch to the next, beyond their end.
    fit_both(small_cnn, x=_dataset(x, y).repeat(), steps_per_epoch=2, epochs=3)


@pytest.mark.thorough
def test_dataset_shuffled_with_a_seed(float64: None) -> None:
    # Keras makes iterators without reading them, and each advances the seed.
    x, y = digits(201)

    def shuffled() -> tf.data.Dataset:
        pairs = tf.data.Dataset.from_tensor_slices((x, y))
        return pairs.shuffle(201, seed=3, reshuffle_each_iteration=True).batch(50)

    common = {"epochs": 3, "verbose": 0}
    expected = small_cnn().fit(shuffled(), **common).history
    assert_same_history(small_cnn().fit(shuffled(), **common, num_processes=2).history, expected)


def _two_inputs_two_outputs(form: str) -> Any:
    tf.keras.utils.set_random_seed(5)
    left, right = L.Input((8, 8, 1), name="left"), L.Input((10,), name="right")
    joined = L.Concatenate()([L.Dense(8, activation="relu")(L.Flatten()(left)), right])
    digit = L.Dense(10, name="digit")(joined)
    parity = L.Dense(1, name="parity")(joined)
    if form == "dict":
        model = Model(inputs={"left": left, "right": right}, outputs={"d": digit, "p": parity})
        names = ["d", "p"]
    else:
        model = Model(inputs=[left, right], outputs=[digit, parity])
        names = ["digit", "parity"]
    losses = [
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        tf.keras.losses.MeanSquaredError(),
    ]
    weights_ = [1.0, 0.3]
    if form == "dict":
        model.compile(
            tf.keras.optimizers.SGD(0.1),
            loss=dict(zip(names, losses, strict=True)),
            loss_weights=dict(zip(names, weights_, strict=True)),
            metrics={"d": ["accuracy"], "p": ["mae"]},
        )
    else:
        model.compile(
            tf.keras.optimizers.SGD(0.1),
            loss=losses,
            loss_weights=weights_,
            metrics=[["accuracy"], ["mae"]],
        )
    return model


@pytest.mark.parametrize("form", ["list", "dict"])
@pytest.mark.parametrize("source", ["arrays", "dataset"])
@pytest.mark.both_generations
def test_two_inputs_two_outputs(float64: None, form: str, source: str) -> None:
    x, y = digits(151)
    more = np.random.default_rng(0).normal(size=(151, 10))
    odd = (y % 2).astype("float64")[:, None]
    inputs: Any = (x, more) if source == "dataset" else [x, more]
    targets: Any = (y, odd) if source == "dataset" else [y, odd]
    if form == "dict":
        inputs, targets = {"left": x, "right": more}, {"d": y, "p": odd}
    if source == "arrays":
        fit_both(lambda: _two_inputs_two_outputs(form), x=inputs, y=targets, batch_size=50)
    else:
        data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(50)
        fit_both(lambda: _two_inputs_two_outputs(form), x=data)


class Perceptron(Model):
    """A subclassed model without get_config: nanotf.keras.Model remembers its arguments."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.flatten = L.Flatten()
        self.hidden = L.Dense(width, activation="tanh")
        self.out = L.Dense(classes)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(self.flatten(inputs)))


def _perceptron() -> Any:
    tf.keras.utils.set_random_seed(3)
    model = Perceptron(12, classes=10)
    model.compile(
        tf.keras.optimizers.SGD(0.1),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model(np.zeros((1, 8, 8, 1)))  # built: both copies must start with the same weights
    return model


@pytest.mark.both_generations
def test_subclassed_model(float64: None) -> None:
    x, y = digits(201)
    fit_both(_perceptron, x=x, y=y, batch_size=50)


class OwnStep(Model):
    """A model with its own train_step, as in Keras's guides."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            if hasattr(self, "compute_loss"):
                loss = self.compute_loss(x=x, y=y, y_pred=prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


def _own_step() -> Any:
    tf.keras.utils.set_random_seed(3)
    inputs = L.Input((8, 8, 1))
    model = OwnStep(inputs, L.Dense(10)(L.Flatten()(inputs)))
    model.compile(
        tf.keras.optimizers.SGD(0.1),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def test_own_train_step_trains_alike(float64: None) -> None:
    x, y = digits(200)
    expected, found = _own_step(), _own_step()
    for model, processes in ((expected, None), (found, 2)):
        model.fit(x, y, batch_size=50, epochs=2, verbose=0, num_processes=processes)
    assert_same_state(found, expected)


def test_frozen_layers_stay_frozen(float64: None) -> None:
    x, y = digits(100)
    found, _ = fit_both(lambda: small_cnn(frozen=True), x=x, y=y, batch_size=50)
    before = small_cnn().get_weights()
    np.testing.assert_array_equal(found.get_weights()[0], before[0])


class RowSums(tf.keras.metrics.Metric):
    """Sums over an epoch of numbers that identify the rows: their count, ids and squared ids."""

    def __init__(self, power: int = 1, name: str = "row_sums", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.power = power
        self.total = self.add_weight(name="total", initializer="zeros", dtype="float64")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, "float64") ** self.power))

    def result(self) -> Any:
        return self.total + 0.0

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "power": self.power}


@pytest.mark.parametrize("source", ["arrays", "dataset"])
@pytest.mark.parametrize("rows", [200, 203])
def test_every_row_once_an_epoch_when_shuffled(float64: None, source: str, rows: int) -> None:
    ids = np.arange(1, rows + 1, dtype="float64")[:, None]
    tf.keras.utils.set_random_seed(1)
    model = Sequential([L.Input((1,)), L.Dense(1)])
    sums = [RowSums(power, name=f"sum{power}") for power in (0, 1, 2, 3)]
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=sums)
    if source == "arrays":
        arguments: dict[str, Any] = {"x": ids, "y": ids, "batch_size": 50, "shuffle": True}
    else:
        pairs = tf.data.Dataset.from_tensor_slices((ids, ids))
        arguments = {"x": pairs.shuffle(rows).batch(50)}
    history = model.fit(**arguments, epochs=3, verbose=0, num_processes=2).history
    for power in range(4):
        np.testing.assert_allclose(history[f"sum{power}"], np.sum(ids**power), rtol=1e-12)


# Numbers of steps that a pass has, that divide it, that do not, and that exceed it.
ORDERS: dict[str, dict[str, Any]] = {
    "whole_batches": {"batch_size": 32},
    "one_batch": {"batch_size": 500},
    "short_last_batch": {"batch_size": 50, "epochs": 3},
    "default_batches": {"validation_split": 0.3},
    "steps_of_a_pass": {"batch_size": 50, "steps_per_epoch": 4},
    "steps_that_divide_a_pass": {"batch_size": 50, "steps_per_epoch": 2, "epochs": 5},
    "fewer_steps_than_a_pass": {"batch_size": 50, "steps_per_epoch": 3, "epochs": 5},
    "more_steps_than_a_pass": {"batch_size": 50, "steps_per_epoch": 6, "epochs": 3},
    "initial_epoch": {"batch_size": 50, "initial_epoch": 2, "epochs": 5},
    "class_weight": {"batch_size": 50, "class_weight": {label: 0.2 + label for label in range(10)}},
    "sample_weight": {"batch_size": 50, "sample_weight": weights(192)},
    "within_batches": {"batch_size": 50, "shuffle": "batch", "epochs": 3},
    "within_batches_and_class_weight": {
        "batch_size": 50,
        "shuffle": "batch",
        "class_weight": {label: 0.2 + label for label in range(10)},
    },
    "within_batches_and_steps": {"shuffle": "batch", "steps_per_epoch": 3, "batch_size": 50},
}


def _numbers_of_a_program(arguments: dict[str, Any], processes: int | None) -> list[Any]:
    """Returns all that a program computes: two fits, an evaluation, random numbers afterwards."""
    x, y = digits(192)
    more = {"epochs": 2, "verbose": 0, "num_processes": processes, **arguments}
    tf.keras.utils.set_random_seed(1)
    layers = [L.Input((8, 8, 1)), L.Flatten(), L.Dense(16, "tanh"), L.Dropout(0.3), L.Dense(10)]
    model = Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    first = model.fit(x, y, **more).history
    between = model.evaluate(x, y, batch_size=50, verbose=0)
    second = model.fit(x, y, **more).history
    assert first["loss"] != second["loss"]
    drawn = [random.random(), np.random.random(), float(tf.random.uniform([], dtype="float64"))]
    kernel = L.Dense(3)
    kernel.build((None, 4))
    return [*first.values(), between, *second.values(), *model.get_weights(), drawn, kernel.kernel]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.both_generations
def test_arrays_come_in_the_order_of_one_process(float64: None, name: str) -> None:
    expected = _numbers_of_a_program(ORDERS[name], None)
    found = _numbers_of_a_program(ORDERS[name], 2)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.both_generations
def test_orders_that_come_in_pieces(float64: None) -> None:
    """More rows than a piece has; epochs that end within one."""
    rows = 2**19 + 2**17 + 5
    x = np.random.default_rng(0).normal(size=(rows, 1))
    found = []
    for workers in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        history = model.fit(
            x, x, batch_size=100_000, epochs=3, steps_per_epoch=5, verbose=0, num_processes=workers
        )
        found.append(history.history["loss"])
        model.fit(x, x, batch_size=200_000, epochs=2, verbose=0, num_processes=workers)
        found[-1] += model.get_weights()[0].ravel().tolist()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


@pytest.mark.parametrize("is_users", [True, False])
@pytest.mark.both_generations
def test_orders_continue_after_complete_passes(is_users: bool) -> None:
    """Without a seed of the user each pass has its own order, in Keras 3 as well."""
    seed = OrderSeed(7, is_users)
    orders = list(Orders(30, 5, 4, seed, 0, 4, False).drawn())
    np.testing.assert_array_equal(np.sort(orders), np.tile(np.arange(30), (4, 1)))
    np.testing.assert_array_equal(list(Orders(30, 5, 4, seed, 2, 2, False).drawn()), orders[2:])
    assert is_users or len({tuple(order) for order in orders}) == 4
    tf.keras.utils.set_random_seed(7)
    assert OrderSeed.now() == (7, True)
