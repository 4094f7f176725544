"""Objects that a model's code holds: variables, other models, the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import TOLERANCE, assert_same_history

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

L = tf.keras.layers
IS_KERAS_3 = is_keras_3()
ROWS, BATCH, WIDTH = 41, 10, 4  # the last batch has one row: fewer than workers


def data() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    y = np.tanh(x.sum(1, keepdims=True))
    return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "verbose": 0}


def variable(value: Any, trainable: bool = False) -> Any:
    return tf.Variable(value, dtype=tf.float64, trainable=trainable)


OF_MODULE = variable(0.5)


def dense(loss: Any) -> Any:
    tf.keras.utils.set_random_seed(4)
    model = Sequential([L.Input((WIDTH,)), L.Dense(5, activation="tanh"), L.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), loss)
    return model


def squares(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


class Annealed(tf.keras.losses.Loss):
    """A loss weighted by its own variable and by a variable in a given dict."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.weight = variable(0.5)
        self.given = given

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * self.given["factor"] * squares(y_true, y_pred)


class Sets(tf.keras.callbacks.Callback):
    """Sets variables at the beginning of epochs."""

    def __init__(self, *variables: Any) -> None:
        super().__init__()
        self.variables = variables

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for number, target in enumerate(self.variables):
            target.assign(np.full(target.shape, 1.0 / (1 + epoch + number)))


def fit_in_turn(make: Callable[[], tuple[Any, list[Any]]], sets: bool = True) -> None:
    """Runs two `fit`s of two epochs with one process, and with two processes; all must agree.

    Args:
        make: makes a model and a list of captured variables.
        sets: bool, whether a callback changes the variables; they change between the fits anyway.
    """
    histories, models, values = [], [], []
    for number in (None, 2):
        model, variables = make()
        history: dict[str, Any] = {}
        for _ in range(2):
            callbacks = [Sets(*variables)] if sets else []
            done = model.fit(**data(), epochs=2, num_processes=number, callbacks=callbacks)
            for name, found in done.history.items():
                history.setdefault(name, []).extend(found)
            for target in variables:
                target.assign(target * 0.75)
        evaluated = model.evaluate(
            data()["x"], data()["y"], verbose=0, return_dict=True, num_processes=number
        )
        history.update({f"evaluated_{name}": [value] for name, value in evaluated.items()})
        histories.append(history)
        models.append(model)
        values.append([np.asarray(target) for target in variables])
    assert_same_history(histories[1], histories[0])
    for ours, theirs in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(values[1], values[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE["float64"])


@pytest.mark.parametrize("sets", [True, False])
@pytest.mark.both_generations
def test_variables_of_losses(float64: None, sets: bool) -> None:
    """Tests variables in a closure, in attributes, in an importable module, and in two places."""

    def closure() -> tuple[Any, list[Any]]:
        factor = variable(0.5)
        OF_MODULE.assign(0.5)
        if IS_KERAS_3:
            other = tf.keras.Variable(0.25, dtype="float64", trainable=False)
        else:
            other = variable(0.25)
        return (
            dense(lambda y, p: (factor + other * OF_MODULE) * squares(y, p)),
            [factor, other, OF_MODULE],
        )

    def attributes() -> tuple[Any, list[Any]]:
        factor = variable(0.5)
        loss = Annealed({"factor": factor})
        return dense(lambda y, p: factor * loss.call(y, p)), [factor, loss.weight]

    fit_in_turn(closure, sets=sets)
    fit_in_turn(attributes, sets=sets)


def test_models_in_losses(float64: None) -> None:
    """A teacher that the loss calls, a layer, and trained weights of the model itself."""

    def make() -> tuple[Any, list[Any]]:
        tf.keras.utils.set_random_seed(8)
        teacher = tf.keras.Sequential([L.Input((1,)), L.Dense(3), L.BatchNormalization()])
        layer = L.Dense(2)
        layer.build((None, 3))

        def loss(y_true: Any, y_pred: Any) -> Any:
            features = squares(layer(teacher(y_true)), layer(teacher(y_pred)))
            kernel = tf.convert_to_tensor(model.layers[0].kernel) + tf.convert_to_tensor(bias)
            return squares(y_true, y_pred) + features + tf.reduce_sum(tf.square(kernel))

        model = dense("mse")
        bias = model.layers[0].bias
        model.compile(tf.keras.optimizers.SGD(0.01), loss)
        return model, [keras_variable(layer.bias), keras_variable(teacher.weights[-1])]

    fit_in_turn(make)


def keras_variable(value: Any) -> Any:
    return value.value if IS_KERAS_3 else value


class Schedule:
    """An object of the script's own, in an attribute of a model."""

    def __init__(self) -> None:
        self.values = [variable(0.5), {"b": variable(0.25)}]


class OwnStep(Model):
    """Holds variables unknown to Keras 3, and assigns some of them in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(1)
        self.beta = variable(0.5)
        self.schedule = Schedule()
        self.level = variable(0.0)
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.alpha = variable(0.3, trainable=True)
        self.tuner = tf.keras.optimizers.SGD(0.05)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        first, second = self.schedule.values[0], self.schedule.values[1]["b"]
        weights = self.out.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            loss = (self.beta + first * second) * tf.reduce_mean(tf.square(predicted - y))
            loss *= tf.exp(-self.alpha)
            loss += self.extra * self.alpha + self.array[1] * tf.reduce_sum(self.out.bias)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tuner.apply_gradients([(tape.gradient(loss, self.alpha), self.alpha)])
        self.level.assign(0.9 * self.level + 0.1 * tf.reduce_mean(y))
        self.beta.assign_add(0.01)
        self.steps.assign_add(1)
        return {"loss": loss}

    def test_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": self.beta * tf.reduce_mean(tf.square(self(x) - y)) + self.level}


def test_variables_of_steps(float64: None) -> None:
    """The step assigns and trains them, callbacks set them; attributes are set after `__init__`."""

    def make() -> tuple[Any, list[Any]]:
        tf.keras.utils.set_random_seed(4)
        model = OwnStep()
        model.extra = variable(0.1)
        model.array = np.array([0.5, 0.25])
        model(data()["x"][:1])
        model.compile(tf.keras.optimizers.SGD(0.1))
        models.append(model)
        return model, [model.beta, model.extra, model.schedule.values[1]["b"]]

    models: list[Any] = []
    fit_in_turn(make)
    plain, found = models
    for name in ("level", "alpha", "steps"):
        ours, theirs = (np.asarray(getattr(model, name)) for model in (found, plain))
        assert theirs != 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, err_msg=name)


class Counting(L.Layer):
    """Averages its inputs and counts batches; counts rows in a weight with aggregation "sum"."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(name="mean", shape=(4,), initializer="zeros", trainable=False)
        self.batches = self.add_weight(
            name="batches", shape=(), initializer="zeros", trainable=False, dtype="int64"
        )
        if IS_KERAS_3:
            self.rows = tf.keras.Variable(
                0.0, trainable=False, aggregation="sum", synchronization="on_read"
            )
        else:
            self.rows = self.add_weight(
                name="rows",
                initializer="zeros",
                trainable=False,
                aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ,
            )
        super().build(shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
            self.batches.assign_add(1)
            self.rows.assign_add(tf.cast(tf.shape(inputs)[0], self.rows.dtype))
        return inputs


@pytest.mark.both_generations
def test_weights_that_layers_assign(float64: None) -> None:
    weights = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(4)
        model = Sequential([L.Input((WIDTH,)), Counting(), L.Dense(1)])
        model.compile("sgd", "mse")
        for _ in range(2):
            model.fit(**data(), epochs=2, num_processes=processes)
        weights.append(model.get_weights())

    for ours, theirs in zip(weights[1], weights[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
