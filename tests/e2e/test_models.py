"""Models of every kind, including those made without nanotf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, digits, fit_both, small_cnn

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentTypeError
from nanotf.keras import Model, Sequential
from nanotf.shipping.objects import heap

L = tf.keras.layers


def test_accelerate_takes_a_model_of_keras_applications() -> None:
    original = tf.keras.applications.MobileNet(
        weights=None, alpha=0.25, input_shape=(32, 32, 3), classes=10
    )
    model = nanotf.accelerate(original)
    assert model is original
    model.compile("sgd", "sparse_categorical_crossentropy")
    images = np.random.default_rng(0).random((16, 32, 32, 3), dtype=np.float32)
    labels = np.arange(16) % 10
    before = model.get_weights()
    history = model.fit(images, labels, batch_size=8, epochs=1, verbose=0, num_processes=2)
    assert np.isfinite(history.history["loss"][0])
    assert int(model.optimizer.iterations.numpy()) == 2
    after = model.get_weights()
    changed = sum(not np.array_equal(a, b) for a, b in zip(after, before, strict=True))
    assert changed > len(after) * 0.9, "weights and moving statistics are returned"
    assert all(np.isfinite(a).all() for a in after)


def test_accelerate_refuses_other_objects() -> None:
    with pytest.raises(InvalidArgumentTypeError, match=r"takes a tf\.keras model.*object of class"):
        nanotf.accelerate(object())


@pytest.mark.both_generations
def test_batch_normalization_and_dropout_train() -> None:
    x, y = digits(300)
    tf.keras.utils.set_random_seed(0)
    model = Sequential(
        [
            L.Input((8, 8, 1)),
            L.Flatten(),
            L.Dense(32, activation="relu"),
            L.BatchNormalization(),
            L.Dropout(0.1),
            L.Dense(10, activation="softmax"),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.01)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=50, epochs=5, verbose=0, num_processes=2).history
    assert history["accuracy"][-1] > history["accuracy"][0]
    moving_mean = model.layers[2].moving_mean
    assert np.abs(np.asarray(moving_mean)).sum() > 0


@pytest.mark.both_generations
def test_unbuilt_sequential_is_built_by_its_first_fit() -> None:
    x, y = digits(100)
    model = Sequential([L.Flatten(), L.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    model.fit(x, y, batch_size=50, verbose=0, num_processes=2)
    assert model.built
    assert model.predict(x[:3], verbose=0).shape == (3, 10)


@pytest.mark.both_generations
def test_embedding_gets_sparse_gradients() -> None:
    words = np.random.default_rng(0).integers(0, 50, (101, 7))
    labels = (words.sum(1) % 2).astype("float32")
    weights = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(2)
        model = Sequential(
            [L.Input((7,)), L.Embedding(50, 4), L.GlobalAveragePooling1D(), L.Dense(1)]
        )
        model.compile(tf.keras.optimizers.SGD(1.0), "mse")
        model.fit(
            words, labels, batch_size=20, epochs=2, shuffle=False, verbose=0,
            num_processes=processes,
        )  # fmt: skip
        weights.append(model.get_weights())
    for ours, theirs in zip(weights[1], weights[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_classes_and_names_are_keras_own() -> None:
    inputs = L.Input((4,))
    model = Model(inputs, L.Dense(1)(inputs))
    assert isinstance(model, tf.keras.Model)
    assert isinstance(small_cnn(), tf.keras.Sequential)
    assert type(model).__name__ == "Functional"
    again = tf.keras.models.model_from_json(model.to_json())
    assert [w.shape for w in again.get_weights()] == [(4, 1), (1,)]
    assert isinstance(tf.keras.models.clone_model(small_cnn()), tf.keras.Sequential)


def test_pandas_and_tensors_as_input() -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(rng.normal(size=(60, 3)), columns=list("abc"))
    target = frame["a"] * 2
    for x, y in ((frame, target), (tf.constant(frame.values), tf.constant(target.values))):
        tf.keras.utils.set_random_seed(0)
        model = Sequential([L.Input((3,)), L.Dense(1)])
        model.compile("sgd", "mse")
        history: Any = model.fit(x, y, epochs=2, verbose=0, num_processes=2).history
        assert history["loss"][1] < history["loss"][0]


class TwoSizes(Model):
    """Has neither get_config() nor plain arguments: workers rebuild it from its arguments."""

    def __init__(self, units: int, activation: Any) -> None:
        super().__init__()
        self.hidden = L.Dense(units, activation=activation)
        self.out = L.Dense(10)
        self.flatten = L.Flatten()

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(self.flatten(x)))


class OfInputs(Model):  # type: ignore[misc]
    """A class that workers import before they have any functional model."""


@pytest.mark.both_generations
def test_a_subclass_of_inputs_and_outputs_changes_no_other_class() -> None:
    x, y = digits(20)
    inputs = tf.keras.Input(x.shape[1:])
    outputs = tf.keras.layers.Dense(10)(tf.keras.layers.Flatten()(inputs))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for model in (OfInputs(inputs, outputs), TwoSizes(8, tf.nn.relu)):
        model.compile("sgd", loss)
        model.fit(x, y, verbose=0, num_processes=2)
        assert np.isfinite(model.history.history["loss"]).all()


@pytest.mark.both_generations
def test_subclass_remembers_the_arguments_of_its_init() -> None:
    x, y = digits(100)
    losses = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(1)
        model = TwoSizes(8, lambda values: tf.nn.relu(values))  # two arguments, as in Model(x, y)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        history = model.fit(
            x, y, batch_size=30, epochs=2, shuffle=False, verbose=0, num_processes=processes
        )
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


class Scale(L.Layer):
    """A layer whose numbers are set later."""

    def __init__(self) -> None:
        super().__init__()
        self._factor = 1.0
        self.shifts = [0.0]

    def call(self, x: Any) -> Any:
        return x * self._factor + sum(self.shifts)


class Tuned(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.out = L.Dense(1)
        self.beta = 0.1
        self.options = {"power": 2.0}

    def call(self, x: Any) -> Any:
        return self.out(self.scale(x)) * self.beta ** self.options["power"]


@pytest.mark.both_generations
def test_attributes_set_after_init(float64: None) -> None:
    x = np.random.default_rng(0).normal(size=(41, 3))
    models = []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(1)
        model = Tuned()
        model.beta = np.float64(0.3)
        model.scale._factor = 3.0
        model.scale.shifts.append(0.5)
        model.options["power"] = 3.0
        model(x[:1])
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=10, shuffle=False, verbose=0, num_processes=processes)
        model.predict(x[:1], verbose=0)
        models.append(model)
    for ours, theirs in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    before, _ = heap.dump_model(models[1])
    models[1].predict(x[:1], verbose=0)
    assert heap.dump_model(models[1])[0] == before, "else workers would not recognize the model"


@pytest.mark.both_generations
def test_workers_know_a_used_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each call would trace the model again."""
    x, y = np.ones((8, 4, 4, 1), "f4"), np.ones((8, 1), "f4")
    inputs = L.Input((4, 4, 1))
    hidden = L.Dropout(0.1)(L.BatchNormalization()(L.Conv2D(2, 2)(inputs)))
    model = Model(inputs, L.Dense(1)(L.Flatten()(hidden)))
    model.compile("adam", "mse", metrics=["mae"])
    sent, dump = [], heap.dump_model

    def noting(model: Any) -> Any:
        found = dump(model)
        sent.append(found[0])
        return found

    monkeypatch.setattr(heap, "dump_model", noting)
    calls: list[Callable[..., Any]] = [
        lambda **how: model.fit(x, y, validation_data=(x, y), verbose=0, **how),
        lambda **how: model.evaluate(x, y, verbose=0, **how),
        lambda **how: model.predict(x, verbose=0, **how),
    ]
    for how in ({"num_processes": 2}, {}, {"num_processes": 2}):
        for call in calls:
            call(**how)
    assert len(sent) == 6
    assert [sent.index(data) for data in sent] == [0] * 6


def test_plain_fit_drops_iterators_without_waiting() -> None:
    x, y = digits(100)
    model = small_cnn()
    model.fit(x, y, batch_size=50, epochs=2, verbose=0, validation_data=(x, y))
    assert model.train_function._nanotf_held is not None
    kept = model.train_function
    model.fit(x, y, batch_size=50, verbose=0)
    assert model.train_function is kept, "traced once, wrapped once"


class Factor:
    """A user's object that no configuration can hold."""

    def __init__(self, value: float) -> None:
        self.value = value


class Applied(L.Layer):
    """Takes a function, an array and an object, and has no `get_config()`."""

    def __init__(self, function: Any, offsets: Any, factor: Factor) -> None:
        super().__init__()
        self.function = function
        self.offsets = offsets
        self._factor = factor

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        return self.function(inputs + self.offsets) * self.scale * self._factor.value


class ScaledSum(tf.keras.metrics.Metric):
    """The sum of targets times an array's sum; takes no name."""

    def __init__(self, scales: Any) -> None:
        super().__init__(name="scaled_sum")
        self.scales = scales
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        targets = tf.cast(y_true, self.total.dtype)
        self.total.assign_add(tf.reduce_sum(targets) * self.scales.sum())

    def result(self) -> Any:
        return self.total


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.both_generations
def test_layers_and_metrics_with_non_configurable_arguments(
    float64: None, functional: bool
) -> None:
    offsets, slope = np.linspace(0, 1, 4), 0.5

    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        layers = [
            Applied(lambda v: tf.nn.leaky_relu(v, slope), offsets, Factor(2.0)),
            L.Dense(4),
            Applied(tf.tanh, -offsets, Factor(0.5)),
            L.Dense(1),
        ]
        model = Sequential([L.Input((4,)), *layers])
        if functional:
            inputs = outputs = L.Input((4,))
            for layer in layers:
                outputs = layer(outputs)
            model = Model(inputs, outputs)
        model.compile("sgd", "mse", metrics=[ScaledSum(np.arange(3.0))])
        return model

    x = np.random.default_rng(0).normal(size=(50, 4))
    fit_both(make, x=x, y=x.sum(axis=1, keepdims=True), batch_size=20)


class Block(L.Layer):
    """Takes layers, some of them in a list, and has no `get_config()`."""

    def __init__(
        self, units: int, inner: Any, act: Any = None, more: Any = (), out: Any = 3
    ) -> None:
        super().__init__()
        self.units = units
        self.dense = L.Dense(units)
        self.inner = inner
        self.act = act
        self.more = list(more)
        self.out = L.Dense(out)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        shape = (shape[0], self.units)
        for layer in (self.inner, *self.more, self.out):
            layer.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        outputs = self.inner(self.dense(inputs))
        for layer in self.more:
            outputs = layer(outputs)
        return self.out(outputs if self.act is None else self.act(outputs))


@pytest.mark.parametrize("out", [3, 4])
@pytest.mark.both_generations
def test_layers_that_are_arguments_of_layers(float64: None, out: int) -> None:
    """`out` has a layer's name but is none."""

    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        arguments: dict[str, Any] = {"act": L.LeakyReLU(), "more": [L.Dense(5, activation="tanh")]}
        model = Sequential([L.Input((4,)), Block(5, L.Dense(5), **arguments, out=out), L.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(0).normal(size=(50, 4))
    data = {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 20}
    fit_both(make, **data)


class Popping(Model):
    """Empties its argument, makes a metric in compile(), and has its own step."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        fixed = tf.keras.initializers.GlorotUniform(seed=1)
        self.hidden = L.Dense(options.pop("units"), kernel_initializer=fixed)
        self.out = L.Dense(1, kernel_initializer=fixed)

    def compile(self, **arguments: Any) -> None:
        super().compile(**arguments)
        self.tracker = tf.keras.metrics.Mean(name="error")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"error": self.tracker.result()}


@pytest.mark.parametrize("built", ["before compile", "after compile", "by fit"])
def test_init_that_empties_its_argument_and_compile_that_makes_a_metric(
    float64: None, built: str
) -> None:
    x = np.random.default_rng(0).normal(size=(50, 4))

    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        model = Popping({"units": 3})
        if built == "before compile":
            model.build((None, 4))
        model.compile(optimizer=tf.keras.optimizers.SGD(0.1))
        if built == "after compile":
            model(x[:1])
        return model

    if built == "before compile" and is_keras_3():
        with pytest.raises(ValueError, match="already built"):  # in a single process
            make()
        return
    fit_both(make, x=x, y=x.sum(axis=1, keepdims=True), batch_size=20)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_variables_frozen_one_by_one(float64: None, optimizer: str) -> None:
    if not is_keras_3():
        pytest.skip("Keras 2 freezes layers alone")

    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        model = Sequential([L.Input((4,)), L.Dense(3), L.Dense(1)])
        model.layers[0].kernel.trainable = False
        model.compile(optimizer, "mse")
        return model

    x = np.random.default_rng(0).normal(size=(50, 4))
    before = np.asarray(make().layers[0].kernel)
    data = {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 20}
    found, _ = fit_both(make, **data)
    np.testing.assert_array_equal(found.layers[0].kernel, before)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.every_case  # the slots of the two have different names
@pytest.mark.both_generations
def test_a_model_made_under_a_mirrored_strategy_trains(optimizer: str) -> None:
    x, y = digits(48)
    options = {"SGD": {"momentum": 0.9}, "Adam": {}}[optimizer]
    strategy = tf.distribute.MirroredStrategy()

    def make() -> Any:
        with strategy.scope():
            return small_cnn(getattr(tf.keras.optimizers, optimizer)(0.01, **options))

    found, expected = fit_both(make, x=x, y=y, batch_size=16)
    again = [
        m.fit(x, y, batch_size=16, shuffle=False, verbose=0, **more).history
        for m, more in ((found, {"num_processes": 2}), (expected, {}))
    ]
    assert_same_history(*again)
    assert_same_state(found, expected)
    numbers, theirs = (
        found.evaluate(x, y, verbose=0, num_processes=2),
        expected.evaluate(x, y, verbose=0),
    )
    np.testing.assert_allclose(numbers, theirs, rtol=1e-4)
    np.testing.assert_allclose(
        found.predict(x, verbose=0, num_processes=2), expected.predict(x, verbose=0), atol=1e-4
    )


def test_the_first_predict_builds_a_model_under_its_strategy() -> None:
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = Sequential([L.Dense(2)])
        model.compile(tf.keras.optimizers.Adam(), "mse")
    x = np.ones((8, 3), np.float32)
    found = model.predict(x, verbose=0, num_processes=2)
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-5)
    model.fit(x, found, verbose=0)  # plain Keras then uses these variables
    assert int(model.optimizer.iterations.numpy()) == 1


class _Noisy(Model):
    def __init__(self) -> None:
        super().__init__(name="noisy")
        self.dense, self.dropout = L.Dense(3), L.Dropout(0.5)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.dropout(self.dense(x), training=training)


@pytest.mark.parametrize("make", [lambda: Sequential([L.Input((3,)), L.Dense(3)]), _Noisy])
@pytest.mark.every_case  # the call builds the second, and rebuilds it to check
@pytest.mark.both_generations
def test_a_model_made_after_a_call_gets_the_weights_of_one_process(make: Any) -> None:
    x = np.ones((8, 3), np.float32)

    def next_weights(**more: Any) -> list[list[np.ndarray]]:
        tf.keras.utils.set_random_seed(1)
        model = make()
        model.compile("adam", "mse")
        found = []
        for call in (model.fit, model.evaluate):
            call(x, x, batch_size=4, verbose=0, **more)
            found.append(Sequential([L.Input((3,)), L.Dense(2)]).get_weights())
        model.predict(x, verbose=0, **more)
        return [*found, Sequential([L.Input((3,)), L.Dense(2)]).get_weights()]

    for found, expected in zip(next_weights(num_processes=2), next_weights(), strict=True):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
