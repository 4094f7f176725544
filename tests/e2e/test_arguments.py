"""Models and arguments of `compile()` of every kind train as in a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, digits, fit_both

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential

L = tf.keras.layers
IS_KERAS_3 = is_keras_3()
ROWS = 61


def features(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 6))


def targets(rows: int = ROWS) -> np.ndarray:
    return (features(rows).sum(1) > 0).astype("float64")[:, None]


def train_both(make: Callable[[], Any], **arguments: Any) -> tuple[Any, Any]:
    """Calls `fit_both` on `features` and `targets`; the last batch has a single row."""
    return fit_both(make, **{"x": features(), "y": targets(), "batch_size": 20, **arguments})


# ----------------------------------------------------------------------- steps of the user's own
class OwnSteps(Model):
    """A model as in Keras's guide: own steps, a loss unknown to Keras, its own trackers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = tf.keras.metrics.Mean(name="loss")
        self.error = tf.keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.abs(y - predicted)) + 0.01 * tf.add_n(
                [tf.reduce_sum(v**2) for v in self.trainable_variables]
            )
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))  # noqa: B905
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, predicted)
        return {"loss": self.loss_tracker.result(), "mae": self.error.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.error.update_state(y, self(x, training=False))
        self.loss_tracker.update_state(1.0)
        return {"loss": self.loss_tracker.result(), "mae": self.error.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.error]


class OwnStepWithoutMetrics(Model):
    """Returns plain tensors; the history has each epoch's last tensor."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))  # noqa: B905
        return {"own_loss": loss}


class OwnStepAround(Model):
    """Wraps Keras's own step."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {**logs}


class OwnLoss(Model):
    """Overrides compute_loss, adding to Keras's loss."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        loss = super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
        return loss + 0.1 * tf.reduce_mean(tf.abs(y_pred))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return dict(logs)


@pytest.mark.thorough
@pytest.mark.parametrize("cls", [OwnSteps, OwnStepWithoutMetrics, OwnStepAround, OwnLoss])
@pytest.mark.both_generations
def test_own_steps(float64: None, cls: Any) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        inputs = L.Input((6,))
        hidden = L.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        model = cls(inputs, L.Dense(1)(hidden))
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5), "mse")
        return model

    train_both(make)
    if cls is not OwnStepWithoutMetrics:
        train_both(make, validation_data=(features(31), targets(31)))


class Adversarial(Model):
    """Takes two optimizers in its own compile(), as in Keras's guide to GANs."""

    def __init__(self, generator: Any, critic: Any) -> None:
        super().__init__()
        self.generator = generator
        self.critic = critic
        self.g_tracker = tf.keras.metrics.Mean(name="g_loss")
        self.c_tracker = tf.keras.metrics.Mean(name="c_loss")

    def compile(self, c_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.c_optimizer = c_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self) -> list[Any]:
        return [self.g_tracker, self.c_tracker]

    def train_step(self, data: Any) -> Any:
        noise, real = data
        with tf.GradientTape() as tape:
            fake = self.generator(noise)
            loss = self.loss_fn(tf.ones_like(real[:, :1]), self.critic(real)) + self.loss_fn(
                tf.zeros_like(real[:, :1]), self.critic(fake)
            )
        weights = self.critic.trainable_weights
        self.c_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))  # noqa: B905
        self.c_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            loss = self.loss_fn(tf.ones_like(real[:, :1]), self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))  # noqa: B905
        self.g_tracker.update_state(loss)
        return {"g_loss": self.g_tracker.result(), "c_loss": self.c_tracker.result()}


def _loss_of_logits(y_true: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y_true, logits))


@pytest.mark.both_generations
def test_own_compile_with_two_optimizers(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        generator = tf.keras.Sequential([L.Input((6,)), L.Dense(4, activation="tanh"), L.Dense(3)])
        critic = Sequential([L.Input((3,)), L.Dense(4, activation="tanh"), L.Dense(1)])
        model = Adversarial(generator, critic)
        model.compile(
            tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.SGD(0.05, momentum=0.9),
            loss_fn=_loss_of_logits,
        )  # fmt: skip
        return model

    expected, found = make(), make()
    data = {"x": features(), "y": features()[:, 3:], "batch_size": 20, "shuffle": False}
    for processes in (2, None, 2):
        theirs = expected.fit(**data, epochs=2, verbose=0)
        ours = found.fit(**data, epochs=2, verbose=0, num_processes=processes)
        assert_same_history(ours.history, theirs.history)
    for ours, theirs in zip(_all_values(found), _all_values(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)
    assert int(found.c_optimizer.iterations.numpy()) == 6 * 4


def _all_values(model: Any) -> list[Any]:
    found = list(model.generator.get_weights()) + list(model.critic.get_weights())
    for optimizer in (model.c_optimizer, model.g_optimizer):
        variables = optimizer.variables
        found += [np.asarray(v) for v in (variables() if callable(variables) else variables)]
    return found


# ------------------------------------------------------------------------- functions by value
SCALE = 0.5  # a global of the script, used by a function


@pytest.mark.both_generations
def test_functions_of_the_script_inside_layers(float64: None) -> None:
    offset = 0.25

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)

        def activation(values: Any) -> Any:
            return tf.tanh(values) * SCALE

        first = activation

        def activation(values: Any) -> Any:  # another of the same name
            return tf.sin(values)

        inputs = L.Input((6,))
        hidden = L.Dense(4, activation=first)(inputs)
        hidden = L.Dense(4, activation=activation)(hidden)
        hidden = L.Dense(4, activation=lambda v: tf.cos(v) * SCALE)(hidden)
        hidden = L.Lambda(lambda v: v * SCALE + offset)(hidden)
        hidden = L.Lambda(lambda v: tf.abs(v) + SCALE)(hidden)
        model = Model(
            inputs, L.Dense(1, kernel_initializer=lambda s, dtype=None: tf.ones(s, dtype))(hidden)
        )
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return model

    train_both(make)


class Scaling(L.Layer):
    """A layer of the script, without get_config()."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale * self.factor


def test_layers_that_two_models_share(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        inner = Sequential([L.Input((6,)), L.Dense(5)])
        other = Model(inner.inputs, L.Dense(4)(inner.outputs[0]))
        inputs = L.Input((6,))
        model = Model(inputs, L.Dense(1)(L.Concatenate()([inner(inputs), other(inputs)])))
        model.compile("sgd", "mse")
        return model

    train_both(make)


@pytest.mark.thorough
def test_layers_of_the_script_and_shared_and_nested_models(float64: None) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        inner = Sequential([L.Input((6,)), L.Dense(5, activation="tanh"), Scaling(0.7)])
        twice = L.Dense(4, activation="tanh")
        other = tf.keras.Sequential([L.Input((6,)), L.Dense(4, name="deep")])
        inner.layers[0].trainable = False
        inputs = L.Input((6,))
        joined = L.Add()([twice(inner(inputs)), other(inputs)])
        model = Model(inputs, L.Dense(1)(joined))
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return model

    train_both(make)


# ------------------------------------------------------------------------ ways to run steps
@pytest.mark.parametrize("compiled", [{"steps_per_execution": 3}, {"run_eagerly": True}])
@pytest.mark.both_generations
def test_ways_to_run_steps(float64: None, compiled: dict[str, Any]) -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        model = Sequential([L.Input((6,)), L.Dense(4, activation="tanh"), L.Dense(1)])
        model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compiled)
        return model

    rows = 103  # six batches, and one with a single row
    found, _ = train_both(
        make,
        x=features(rows),
        y=targets(rows),
        batch_size=17,
        validation_data=(features(), targets()),
    )
    assert int(found.optimizer.iterations.numpy()) == 14


def _classifier(jit_compile: Any = None) -> Any:
    tf.keras.utils.set_random_seed(2)
    model = Sequential(
        [
            L.Input((8, 8, 1)),
            L.Conv2D(4, 3, activation="relu"),
            L.BatchNormalization(momentum=0.5),
            L.Flatten(),
            L.Dense(10),
        ]
    )
    model.layers[1].trainable = False  # otherwise its statistics would cover only one worker's rows
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def test_jit_compile() -> None:
    x, y = digits(101)
    model, _ = fit_both(lambda: _classifier(True), x=x, y=y, batch_size=20)
    alone = {"predict": model.predict(x, verbose=0), "evaluate": model.evaluate(x, y, verbose=0)}
    for first, second in (("predict", "evaluate"), ("evaluate", "predict")):
        other = _classifier(True)
        other.set_weights(model.get_weights())
        for name in (first, second):
            data = (x,) if name == "predict" else (x, y)
            found = getattr(other, name)(*data, verbose=0, num_processes=2)
            np.testing.assert_allclose(found, alone[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("of", ["all", "one_layer"])
@pytest.mark.both_generations
def test_mixed_precision(policy: str, of: str) -> None:
    x, y = digits(100)
    if of == "all":
        tf.keras.mixed_precision.set_global_policy(policy)

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        model = Sequential(
            [
                L.Input((8, 8, 1)),
                L.Flatten(),
                L.Dense(16, activation="relu", dtype=policy if of == "one_layer" else None),
                L.Dense(10, dtype="float32"),
            ]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    expected, found = make(), make()
    data = {"x": x, "y": y, "batch_size": 20, "shuffle": False, "epochs": 2, "verbose": 0}
    theirs, ours = expected.fit(**data), found.fit(**data, num_processes=2)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=0.02)
    assert type(found.optimizer) is type(expected.optimizer)
    assert int(found.optimizer.iterations.numpy()) == 10
    if policy == "mixed_float16" and of == "all":
        for name in ("step_counter", "dynamic_scale") if IS_KERAS_3 else ("dynamic_counter",):
            ours, theirs = (getattr(model.optimizer, name) for model in (found, expected))
            assert float(ours.numpy()) == float(theirs.numpy()), name
    assert found.layers[1].compute_dtype == policy.removeprefix("mixed_")


@pytest.mark.both_generations
def test_freezing_between_fits(float64: None) -> None:
    expected, found = _frozen_later(), _frozen_later()
    data = {"x": features(), "y": targets(), "batch_size": 20, "shuffle": False, "verbose": 0}
    for frozen in (False, True, False):
        for model, processes in ((expected, None), (found, 2)):
            model.layers[0].trainable = not frozen
            model.compile(tf.keras.optimizers.Adam(0.01), "mse")
            model.fit(**data, num_processes=processes)
        for ours, theirs in zip(found.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)


def _frozen_later() -> Any:
    tf.keras.utils.set_random_seed(2)
    return Sequential([L.Input((6,)), L.Dense(4, activation="tanh"), L.Dense(1)])


# ---------------------------------------------------------------------------------- randomness
def _recorder(make_layer: Callable[[], Any]) -> Any:
    """Returns a model whose kernel grows by a random layer's mean output for ones."""
    tf.keras.utils.set_random_seed(2)
    model = Sequential(
        [L.Input((400,)), make_layer(), L.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(tf.keras.optimizers.SGD(1.0), lambda y_true, y_pred: -y_pred[:, 0])
    return model


RANDOM = {
    "dropout": lambda: L.Dropout(0.5),
    "dropout_with_seed": lambda: L.Dropout(0.5, seed=7),
    "noise": lambda: L.GaussianNoise(1.0),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_layers_differ_between_workers_and_steps(name: str) -> None:
    model = _recorder(RANDOM[name])
    ones = np.ones((2, 400), "float32")  # one row for each worker
    kernels = [np.zeros(400)]
    for _ in range(3):
        model.fit(ones, ones[:, 0], batch_size=2, verbose=0, num_processes=2)
        kernels.append(model.layers[-1].get_weights()[0][:, 0])
    drawn = np.diff(kernels, axis=0)
    if "dropout" in name:
        # 0 and 2 where both workers drop or keep, 1 where they differ: half of the time.
        assert set(np.round(drawn, 3).ravel()) == {0.0, 1.0, 2.0}
        assert 0.3 < np.mean(np.round(drawn, 3) == 1.0) < 0.7
    else:  # noise of two independent rows, averaged
        assert 0.6 < drawn.std() < 0.82
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert abs(np.corrcoef(drawn[a], drawn[b])[0, 1]) < 0.3, "every fit draws new numbers"
    if IS_KERAS_3:
        alone = _recorder(RANDOM[name])
        for _ in range(3):
            alone.fit(ones, ones[:, 0], batch_size=2, verbose=0)
        for ours, theirs in zip(
            model.non_trainable_variables, alone.non_trainable_variables, strict=True
        ):
            np.testing.assert_array_equal(ours, theirs, err_msg="the seed stands where it would")


@pytest.mark.thorough
def test_random_flips_differ_between_workers() -> None:
    ramp = np.tile(np.linspace(-1, 1, 400, dtype="float32"), (2, 1))[:, None, :, None]

    def make() -> Any:
        model = Sequential(
            [
                L.Input((1, 400, 1)),
                L.RandomFlip("horizontal", seed=3),
                L.Flatten(),
                L.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(tf.keras.optimizers.SGD(1.0), lambda y_true, y_pred: -y_pred[:, 0])
        return model

    model, ends, before = make(), [], 0.0
    for _ in range(12):
        model.fit(ramp, ramp[:, 0, 0], batch_size=2, verbose=0, num_processes=2)
        after = model.layers[-1].get_weights()[0][0, 0]
        ends.append(round(float(after - before), 3))
        before = after
    assert 0.0 in ends, "at some step one worker flipped and the other did not"
    assert len(set(ends)) > 1


# ------------------------------------------------------------------------- batch normalization
def _normalised(**arguments: Any) -> Any:
    tf.keras.utils.set_random_seed(2)
    layers = [L.Input((6,)), L.Dense(4), L.BatchNormalization(momentum=0.5, **arguments)]
    model = Sequential([*layers, L.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.both_generations
def test_batch_normalization(float64: None) -> None:
    fit_both(_normalised, x=features(41), y=targets(41), batch_size=20)


@pytest.mark.both_generations
def test_synchronized_batch_normalization(float64: None) -> None:
    fit_both(lambda: _normalised(synchronized=True), x=features(100), y=targets(100), batch_size=20)
    # One worker has the single row of the last batch.
    fit_both(lambda: _normalised(synchronized=True), x=features(41), y=targets(41), batch_size=20)


def test_validation_uses_the_mean_of_moving_statistics(float64: None) -> None:
    model = _normalised()
    validation = 2 * features(30), targets(30)
    history = model.fit(
        features(40), targets(40), batch_size=10, epochs=2, verbose=0, validation_data=validation,
        num_processes=2,
    ).history  # fmt: skip
    expected = model.evaluate(*validation, verbose=0)
    np.testing.assert_allclose(history["val_loss"][-1], expected, rtol=1e-10)


# -------------------------------------------------------------------------------- preprocessing
def test_preprocessing_layers() -> None:
    words = np.array(["red", "green", "blue", "teal"])[np.arange(ROWS) % 4][:, None]
    numbers = (np.arange(ROWS, dtype="int64") % 9)[:, None]
    texts = np.array(["a b c", "b c", "c c d"])[np.arange(ROWS) % 3][:, None]
    floats = features().astype("float32")

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        normalise = L.Normalization()
        normalise.adapt(floats)
        vectorise = L.TextVectorization(output_sequence_length=4)
        vectorise.adapt(texts)
        lookup = L.IntegerLookup(output_mode="one_hot")
        lookup.adapt(numbers)
        bins = L.Discretization(num_bins=3, output_mode="one_hot")
        bins.adapt(floats[:, :1])
        weigh = L.TextVectorization(output_mode="tf_idf")
        weigh.adapt(texts)
        word, text = L.Input((1,), dtype="string"), L.Input((1,), dtype="string")
        number, value = L.Input((1,), dtype="int64"), L.Input((6,))
        parts = [
            L.StringLookup(vocabulary=["red", "blue"], output_mode="one_hot")(word),
            L.Flatten()(L.Embedding(8, 2)(vectorise(text))),
            L.Flatten()(L.Embedding(5, 2)(L.Hashing(5)(word))),
            L.Flatten()(weigh(text)),
            lookup(number),
            normalise(value),
            L.Rescaling(0.1)(value),
            L.Flatten()(bins(value[:, :1])),
        ]
        model = Model([word, text, number, value], L.Dense(1)(L.Concatenate()(parts)))
        model.compile(tf.keras.optimizers.SGD(0.05), "mse")
        return model

    y = targets().astype("float32")
    inputs = (words, texts, numbers, floats)
    data = tf.data.Dataset.from_tensor_slices((inputs, y)).batch(20)
    expected, found = make(), make()
    theirs = expected.fit(data, epochs=2, verbose=0)
    ours = found.fit(data, epochs=2, verbose=0, num_processes=2)
    assert_same_history(ours.history, theirs.history)
    for a, b in zip(found.trainable_variables, expected.trainable_variables, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    assert found.predict(data, verbose=0).shape == (ROWS, 1), "the tables are complete"
