"""Each reduction in a user's `train_step` gives the gradient of one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

pytestmark = pytest.mark.both_generations

L = tf.keras.layers
ROWS, BATCH, WIDTH = 41, 10, 4  # the last batch has one row: fewer than workers
UNREDUCED: Any = None if is_keras_3() else "none"


def _data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.normal(size=(ROWS, WIDTH)), random.normal(size=(ROWS, 2))


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
    x, y = _data()
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
    x, y = _data()
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
    x, y = _data()
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


class LossOfOneOutput(Model):
    """Returns two outputs, and its step passes one of them to the losses of `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        out = self.out(inputs)
        return {"largest": tf.reduce_max(out, 1), "out": out}

    def _loss_of(self, data: Any, training: bool) -> Any:
        x, y = data
        return self.compute_loss(x, y, self(x, training=training)["out"])

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss_of(data, True)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        self._loss_of(data, False)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.skipif(
    is_keras_3(), reason="Keras 3 builds losses from the model's outputs, without the step"
)
@pytest.mark.parametrize("first", ["fit", "evaluate"])
def test_a_step_that_passes_one_of_two_outputs_to_the_loss(float64: None, first: str) -> None:
    """There is one loss to report, not one for each output that the model has."""
    x, y = _data()
    results = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = LossOfOneOutput()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model(x[:1])
        given: Any = {"batch_size": BATCH, "verbose": 0, "num_processes": processes}
        if first == "fit":
            results.append(model.fit(x, y, epochs=2, shuffle=False, **given).history)
        else:
            results.append(model.evaluate(x, y, return_dict=True, **given))
    assert list(results[1]) == list(results[0]) == ["loss"]
    assert_same_history(results[1], results[0])


class OwnLogs(Model):
    """Adds to the results of Keras's metrics: a mean, and a value derived from a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "bias": tf.reduce_mean(y_pred - y), "root": tf.sqrt(logs["mae"])}


class OwnStepOfMetrics(Model):
    """Returns the results of its own metrics, and the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2, activation="sigmoid")
        self.mean = tf.keras.metrics.Mean(name="loss")
        self.auc = tf.keras.metrics.AUC(name="auc")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean, self.auc]

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def _logs(self, y: Any, predicted: Any, loss: Any) -> Any:
        self.mean.update_state(loss)
        self.auc.update_state(tf.cast(y > 0, predicted.dtype), predicted)
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        return {**{metric.name: metric.result() for metric in self.metrics}, "rate": rate}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(predicted - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self._logs(y, predicted, loss)

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x)
        return self._logs(y, predicted, tf.reduce_mean(tf.square(predicted - y)))


class OwnStepOfGradients(OwnStepOfMetrics):
    """Clips and accumulates gradients, applies the sum every other step, and reports the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = tf.keras.metrics.Mean(name="norm")
        self.steps = tf.Variable(0, trainable=False)

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.norm]

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.out.build(shape)
        self.sums = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for v in self.trainable_variables
        ]

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = tf.reduce_mean(tf.square(predicted - y))
            inner = tape.gradient(loss, weights)
            penalty = tf.linalg.global_norm(inner)
        second = outer.gradient(penalty, weights)
        gradients = [a + 0.1 * b for a, b in zip(inner, second, strict=True)]
        clipped, norm = tf.clip_by_global_norm(gradients, 0.2)
        for total, gradient in zip(self.sums, clipped, strict=True):
            total.assign_add(gradient)
        self.steps.assign_add(1)
        applied = [t * tf.cast(self.steps % 2 == 0, t.dtype) for t in self.sums]
        self.optimizer.apply_gradients(zip(applied, weights, strict=True))
        for total, gradient in zip(self.sums, applied, strict=True):
            total.assign_sub(gradient)
        self.norm.update_state(norm)
        return self._logs(y, predicted, loss)


def assert_same_logs(cls: Any, x: Any, y: Any, eagerly: bool) -> None:
    """Compares the results of `fit`, validation and `evaluate` with a single process's."""
    histories, values = [], []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(3)
        model = cls()
        model.compile(tf.keras.optimizers.SGD(0.01), "mse", metrics=["mae"], run_eagerly=eagerly)
        model(x[:1])
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, num_processes=processes,
            validation_data=(x[:21], y[:21]),
        )  # fmt: skip
        histories.append(history.history)
        values.append(
            model.evaluate(
                x, y, batch_size=BATCH, verbose=0, num_processes=processes, return_dict=True
            )
        )
    assert_same_history(histories[1], histories[0])
    assert_same_history(values[1], values[0])


@pytest.mark.parametrize(
    ("cls", "eagerly"),
    [
        (OwnLogs, False),
        (OwnStepOfMetrics, False),
        (OwnStepOfMetrics, True),
        (OwnStepOfGradients, False),
        (OwnStepOfGradients, True),
    ],
)
def test_metrics_in_own_logs(float64: None, cls: Any, eagerly: bool) -> None:
    """The last batch has no row for one of the workers."""
    assert_same_logs(cls, *_data(), eagerly)


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
    x, y = _data()
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
    x, y = (values.astype(np.float32)[:40] for values in _data())
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


class Weighted(Model):  # type: ignore[misc, valid-type]
    """A model with a plain attribute that its step reads, as a VAE's `beta`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = L.Dense(2)
        self.beta = 1.0

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.beta * tf.reduce_mean((self(x) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def get_config(self) -> Any:
        return {}


class _Anneals(tf.keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.beta = 0.5

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.beta += 1.0


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.every_case
def test_an_attribute_that_a_callback_sets(float64: None, eagerly: bool) -> None:
    """A trace reads the value from when it is made, a step without trace each value."""
    models, losses = [], []
    for arguments in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model = Weighted()
        model.compile(tf.keras.optimizers.SGD(0.01), run_eagerly=eagerly)
        fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [_Anneals()]}
        losses.append(model.fit(*_data(), epochs=3, **fit, **arguments).history["loss"])
        assert model.beta == 3.5
        models.append(model)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    assert_same_state(models[1], models[0])


class Counting(Weighted):
    """A model whose eager steps read values and count, as code under a debugger does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        self.steps += 1
        self.beta = 1.0 if self.steps < 4 else 0.5
        logs = super().train_step(data)
        assert float(logs["loss"].numpy()) >= 0.0
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        self.steps += 100
        return {"loss": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}

    def predict_step(self, data: Any) -> Any:
        self.steps += 10_000
        return self(data[0] if isinstance(data, tuple) else data)


@pytest.mark.both_generations
def test_attributes_that_eager_steps_change(float64: None) -> None:
    """They come back after each method, and the next one continues with them."""
    models, results, counts = [], [], []
    for options in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model = Counting()
        model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
        given = {"batch_size": BATCH, "verbose": 0, **options}
        history = model.fit(*_data(), shuffle=False, **given).history["loss"]
        counts.append([model.steps])
        results.append([history, model.evaluate(*_data(), **given)])
        counts[-1].append(model.steps)
        results[-1] += [model.predict(_data()[0], **given)]
        counts[-1].append(model.steps)
        results[-1] += [model.fit(*_data(), shuffle=False, **given).history["loss"]]
        counts[-1].append(model.steps)
        models.append(model)
    assert counts[1] == counts[0]
    for ours, theirs in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert_same_state(models[1], models[0])


class Stepped(Model):
    """A model whose step computes its loss by a function of a batch, the model and its outputs."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.own_loss = loss
        self.hidden, self.out = L.Dense(3), L.Dense(2)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.own_loss(self, data)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


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


class Noisy(Stepped):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return super().train_step((x + tf.keras.random.normal(tf.shape(x)), y))


def _squared(model: Any, data: Any) -> Any:
    return tf.reduce_mean((model(data[0]) - data[1]) ** 2)


@pytest.mark.skipif(not is_keras_3(), reason="Keras 2 has no global generator of random numbers")
def test_a_callback_draws_from_the_generator_of_the_step(float64: None) -> None:
    """The program is one whose callback shows generated images at the end of each epoch."""
    models, results = [], []
    for options in ({}, {"num_processes": 2}):
        tf.keras.utils.set_random_seed(2)
        model, drawn = Noisy(_squared), []
        model.compile(tf.keras.optimizers.SGD(0.05))

        def draw(*_: Any, into: list[float] = drawn) -> None:
            into.append(float(tf.keras.random.normal((1,))[0]))

        shows = tf.keras.callbacks.LambdaCallback(on_epoch_end=draw)
        given = {"batch_size": BATCH, "verbose": 0, "callbacks": [shows], **options}
        losses = model.fit(*_data(), epochs=3, **given).history["loss"]
        draw()
        results.append([losses, drawn])
        models.append(model)
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-10)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-10)
    assert_same_state(models[1], models[0])
