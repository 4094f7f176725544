"""Each reduction in a user's `train_step` gives the gradient of one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from own_steps import BATCH, ROWS, WIDTH, Stepped, data_of_steps
from parity import assert_same_history, assert_same_state

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers

UNREDUCED: Any = None if is_keras_3() else "none"


def _mse(reduction: Any) -> Any:
    return tf.keras.losses.MeanSquaredError(reduction=reduction)


def _mean_of_unreduced(y: Any, p: Any) -> Any:
    return tf.reduce_mean(_mse(UNREDUCED)(y, p))


def _default(y: Any, p: Any) -> Any:
    return tf.keras.losses.MeanSquaredError()(y, p)


def _weighted(y: Any, p: Any) -> Any:
    return tf.keras.losses.MeanSquaredError()(y, p, sample_weight=tf.abs(y[:, 0]))


def _sum(y: Any, p: Any) -> Any:
    return _mse("sum")(y, p)


def _function(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.keras.losses.get("mse")(y, p))


def _average(y: Any, p: Any) -> Any:
    values = _mse(UNREDUCED)(y, p)
    return tf.nn.compute_average_loss(values, global_batch_size=BATCH)


def _average_of_the_rows(y: Any, p: Any) -> Any:
    return tf.nn.compute_average_loss(_mse(UNREDUCED)(y, p), sample_weight=tf.abs(y[:, 0]))


def _values_of_rows(y: Any, p: Any) -> Any:
    return _mse(UNREDUCED)(y, p)


REDUCTIONS = {
    f.__name__.strip("_"): f
    for f in (
        _mean_of_unreduced,
        _default,
        _weighted,
        _sum,
        _function,
        _average,
        _average_of_the_rows,
        _values_of_rows,
    )
}


class OwnStep(Model):
    """Trains by one of `REDUCTIONS`, with a regularizer."""

    def __init__(self, name_of_loss: str, width: int) -> None:
        super().__init__()
        self.name_of_loss = name_of_loss
        self.hidden = L.Dense(width, activation="tanh", kernel_regularizer="l2")
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = REDUCTIONS[self.name_of_loss](y, self(x, training=True))
            loss += tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": tf.reduce_mean(loss)}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("rows", [40, ROWS])
def test_own_reductions(float64: None, name: str, rows: int) -> None:
    x, y = data_of_steps()
    models, histories = [], []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = OwnStep(name, 3)
        model.compile(tf.keras.optimizers.SGD(0.01, momentum=0.9))
        model(x[:1])
        history = model.fit(
            x[:rows], y[:rows], batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
            num_processes=processes,
        )  # fmt: skip
        models.append(model)
        histories.append(history.history)
    assert_same_state(models[1], models[0])
    if rows == 40:  # Keras 2 and Keras 3 report the last batch's value, which a worker may lack
        assert_same_history(histories[1], histories[0])


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.thorough
def test_a_compiled_loss_that_the_step_does_not_use(float64: None, validates: bool) -> None:
    """In Keras 2 the step's return value is reported, if validation does not use that loss either.

    Keras 3 has a metric of that name anyway, and reports it instead.
    """
    x, y = data_of_steps()
    histories, batches = [], []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = OwnStep("default", 3)
        model.compile(tf.keras.optimizers.SGD(0.01), "mse")
        model(x[:1])
        heard: list[float] = []
        model.fit(
            x[:40], y[:40], batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
            num_processes=processes, validation_data=(x, y) if validates else None,
            callbacks=[
                tf.keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs, heard=heard: heard.append(logs["loss"])
                )
            ],
        )  # fmt: skip
        histories.append(model.history.history)
        batches.append(heard)
    assert_same_history(histories[1], histories[0])
    if not validates and not is_keras_3():
        np.testing.assert_allclose(batches[1], batches[0], rtol=1e-10)


class OwnLoss(Model):
    """Computes its loss from unreduced values, in Keras's own step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        return _mean_of_unreduced(y, y_pred) + 0.1 * _average(y, y_pred)


def test_own_compute_loss(float64: None) -> None:
    x, y = data_of_steps()
    models = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = OwnLoss()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model(x[:1])
        model.fit(
            x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, num_processes=processes
        )
        models.append(model)
    assert_same_state(models[1], models[0])


class OwnStepInside(OwnStep):
    """Takes its step in a branch, or in a separate function."""

    def __init__(self, in_branch: bool) -> None:
        super().__init__("default", 3)
        self.in_branch = in_branch

    @tf.function
    def _update(self, data: Any) -> Any:
        return super().train_step(data)["loss"]

    def train_step(self, data: Any) -> Any:
        if not self.in_branch:
            return {"loss": self._update(data)}
        update = functools.partial(super().train_step, data)
        skip = functools.partial(tf.constant, 0.0, tf.float64)
        counts = self.optimizer.iterations % 2 == 0

        def skips() -> Any:
            self.optimizer.iterations.assign_add(1)
            return skip()

        return {"loss": tf.cond(counts, lambda: update()["loss"], skips)}


@pytest.mark.parametrize("in_branch", [True, False])
def test_optimizer_inside_an_own_step(float64: None, in_branch: bool) -> None:
    x, y = data_of_steps()
    models = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = OwnStepInside(in_branch)
        model.compile(tf.keras.optimizers.SGD(0.01, momentum=0.9))
        model(x[:1])
        model.fit(
            x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, num_processes=processes
        )
        models.append(model)
    assert_same_state(models[1], models[0])


class Distiller(Model):
    """Follows keras.io's example of knowledge distillation: its step trains only the student."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        wanted = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            p = self.student(x, training=True)
            loss = 0.1 * _default(y, p) + 0.9 * _default(wanted, p)
        trained = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return {"distilled": loss}


def _distiller() -> Any:
    tf.keras.utils.set_random_seed(1)

    def net(width: int) -> Any:
        return tf.keras.Sequential([L.Input((WIDTH,)), L.Dense(width, "relu"), L.Dense(2)])

    model = Distiller(net(3), net(6))
    model.compile(tf.keras.optimizers.Adam(0.01))
    return model


def test_an_optimizer_has_slots_only_for_the_variables_trained() -> None:
    x, y = (values.astype(np.float32)[:40] for values in data_of_steps())
    found, expected = _distiller(), _distiller()
    for _ in range(2):
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        assert_same_history(
            found.fit(x, y, num_processes=2, **options).history,
            expected.fit(x, y, **options).history,
        )
        assert_same_state(found, expected)
    found.fit(x, y, **options)  # plain Keras continues with these variables
    expected.fit(x, y, **options)
    assert_same_state(found, expected)


def _looked_up(model: Any, data: Any) -> Any:
    """Returns a loss of some rows of an output, whose gradient is sparse; as on a graph's nodes."""
    x, y = data
    return tf.reduce_mean((tf.gather(model(x), [1, 0, 1]) - y[:3]) ** 2)


def _of_known_rows(model: Any, data: Any) -> Any:
    x, y = data
    rows = tf.shape(x, out_type=x.dtype)[0]  # possible where TensorFlow knows the number
    return tf.reduce_sum((model(x) - y) ** 2) / rows / x.shape[0]


@pytest.mark.both_generations
@pytest.mark.every_case
@pytest.mark.parametrize("loss", [_looked_up, _of_known_rows])
@pytest.mark.parametrize("rows", [44, 40])
def test_losses_of_own_steps(float64: None, loss: Any, rows: int) -> None:
    """The dataset drops a short last batch, so that TensorFlow knows the rows of each."""
    x, y = (np.random.default_rng(i).normal(size=(rows, n)) for i, n in enumerate((4, 2)))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    models, histories = [], []
    for options in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model = Stepped(loss)
        model.compile(tf.keras.optimizers.SGD(0.05))
        histories.append(model.fit(data, epochs=2, verbose=0, **options).history)
        models.append(model)
    assert_same_history(histories[1], histories[0])
    assert_same_state(models[1], models[0])
