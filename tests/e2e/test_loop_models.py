"""Models and optimizers get what a `@nano` function changes and builds, without retracing."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import loops
import numpy as np
import pytest
import tensorflow as tf
from loops import cross_entropy, dense, plain_step

from nanotf.keras import nano

two = nano(num_processes=2)


@pytest.mark.both_generations
def test_an_optimizer_built_by_the_first_call_causes_no_retracing() -> None:
    model, optimizer, traced = dense(), tf.keras.optimizers.Adam(0.1), {"number": 0}

    @tf.function
    def step(inputs: Any) -> Any:
        traced["number"] += 1
        return plain_step(inputs, model, cross_entropy(), optimizer)

    @two
    def train(data: Any) -> int:
        for inputs in data:
            step(inputs)
        return int(optimizer.iterations)

    data, after = loops.dataset(32, 16), []
    for _ in range(3):
        assert train(data) == int(optimizer.iterations)
        after.append(traced["number"])
    assert after[0] == after[1] == after[2]
    assert int(optimizer.iterations) == 6


@pytest.mark.both_generations
def test_a_new_optimizer_of_the_same_code() -> None:
    model = dense()

    @two
    def train(data: Any, optimizer: Any) -> int:
        for inputs in data:
            plain_step(inputs, model, cross_entropy(), optimizer)
        return int(optimizer.iterations)

    data = loops.dataset(32, 16)
    first, other = (tf.keras.optimizers.Adam(0.1) for _ in range(2))
    assert [train(data, first) for _ in range(2)] == [2, 4]
    assert [train(data, other) for _ in range(2)] == [2, 4], "the code equals the first one's"
    assert int(first.iterations) == int(other.iterations) == 4


class Pair(tf.keras.Model):  # type: ignore[misc]
    """Has a layer that other models may share, a layer of its own, and attributes for notes."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared, self.own = shared, tf.keras.layers.Dense(1, kernel_initializer="ones")
        self.calls, self.seen, self.best = 0, [0.0], {"epoch": {"number": 0}}

    def call(self, x: Any) -> Any:
        return self.own(self.shared(x))


@pytest.mark.both_generations
def test_models_that_share_a_layer(float64: None) -> None:
    def program(run: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        shared = tf.keras.layers.Dense(2)
        first, second = Pair(shared), Pair(shared)
        x = loops.rows(8)[0]
        optimizer = tf.keras.optimizers.Adam(0.1)
        first(x), second(x)

        @run
        def train(models: Any) -> Any:
            assert models[0].shared is models[1].shared is shared
            for model in models:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x)))
                variables = shared.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

        train([first, second])
        assert first.shared is shared
        return [w.numpy() for w in (*first.weights, *second.weights)], int(optimizer.iterations)

    (ours, steps), (theirs, expected) = program(two), program(lambda f: f)
    assert steps == expected == 2
    for found, value in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-9)


@pytest.mark.both_generations
def test_attributes_that_the_loop_sets_on_a_model() -> None:
    def program(run: Any) -> Any:
        model = Pair(tf.keras.layers.Dense(2, kernel_initializer="ones"))
        seen = model.seen
        x = tf.ones([4, 3])
        model(x)

        @run
        def train() -> None:
            model.calls += 1
            model.seen.append(float(tf.reduce_sum(model(x))))
            model.best["epoch"]["number"] = model.calls
            model.note = "new"

        for _ in range(3):
            train()
        assert model.seen is seen
        return model.calls, list(model.seen), dict(model.best["epoch"]), model.note

    assert program(two) == program(lambda f: f)


class Attending(tf.keras.layers.Layer):  # type: ignore[misc]
    """Keeps the scores of its last call, as tutorials plot them, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.scores, self.calls = tf.keras.layers.Dense(3), None, 0

    def call(self, x: Any) -> Any:
        self.scores = tf.nn.softmax(self.dense(x))
        self.calls += 1
        return tf.reduce_sum(self.scores * x[:, :3], -1, keepdims=True)


@pytest.mark.both_generations
def test_attributes_that_a_call_sets_are_of_the_whole_batch(float64: None) -> None:
    def program(run: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.layers.Dense(4), Attending()])
        x = loops.rows(7)[0]
        model(x)

        @run
        def outputs() -> Any:
            before = model.layers[1].calls
            model(x)
            return model.layers[1].scores, model.layers[1].calls - before

        scores, calls = outputs()
        np.testing.assert_array_equal(model.layers[1].scores, scores)
        return scores, calls, model.layers[1].calls

    (ours, *counted), (theirs, *expected) = program(two), program(lambda f: f)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert counted == expected


@dataclasses.dataclass
class Best:
    loss: float
    epoch: int


class Blocks(tf.keras.layers.Layer):
    """Makes its layers when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Any] = []

    def build(self, shape: Any) -> None:
        for _ in range(2):
            self.blocks.append(tf.keras.layers.Dense(shape[-1]))
            self.blocks[-1].build(shape)
        self.shift = np.linspace(0.0, 1.0, shape[-1])
        self.relu = lambda x: tf.maximum(x, 0)
        super().build(shape)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.relu(block(x))
        return x + tf.cast(self.shift, x.dtype)


class Counting(tf.keras.Model):
    """An unbuilt model, with attributes that a loop fills."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.parts = [first, Blocks(), tf.keras.layers.Dense(1)]
        self.epochs, self.best, self.totals = 0, None, []

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.both_generations
@pytest.mark.parametrize("decorate", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_attributes_of_models_built_by_the_call(float64: None, decorate: Any) -> None:
    def program(run: Any) -> Any:
        tf.keras.utils.set_random_seed(1)
        first = tf.keras.layers.Dense(4)
        models = [Counting(first), Counting(first)]
        optimizers = [tf.keras.optimizers.SGD(0.01) for _ in models]
        x = loops.rows(7)[0]

        def step(model: Any, optimizer: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        steps = [decorate(step) for _ in models]

        @run
        def train() -> Any:
            for model, optimizer, one_step in zip(models, optimizers, steps, strict=True):
                model.last = one_step(model, optimizer)
                model.totals.append(float(model.last))
                model.epochs += 1
                if model.best is None or model.best.loss > model.totals[-1]:
                    model.best = Best(model.totals[-1], model.epochs)
            return models[0].parts, models[0].trainable_variables

        for _ in range(2):
            parts, weights = train()
            assert all(map(lambda a, b: a is b, parts, models[0].parts))
            assert all(map(lambda a, b: a is b, weights, models[0].trainable_variables))
        noted = [(m.epochs, len(m.totals), m.best.epoch, len(m.parts[1].blocks)) for m in models]
        numbers = [(m.totals, m.best.loss, m.last, m.parts[1].shift, m(x)) for m in models]
        return noted, tf.nest.flatten(numbers)

    (noted, ours), (expected, theirs) = program(two), program(lambda f: f)
    assert noted == expected == [(2, 2, 2, 2)] * 2
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


class Measured(tf.keras.layers.Layer):  # type: ignore[misc]
    """A layer that makes parts, and notes what it has seen, when it is built."""

    def build(self, shape: Any) -> None:
        self.parts = {f"part{i}": tf.keras.layers.Dense(2) for i in range(2)}
        self.seen, self.kept = types.SimpleNamespace(shape=tuple(shape)), [np.ones(2)]
        for part in self.parts.values():
            part.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return sum(part(x) for part in self.parts.values())


@pytest.mark.both_generations
def test_what_a_layer_makes_when_it_is_built_comes_home() -> None:
    layer, x = Measured(), tf.ones((4, 3))

    @two
    def train(x: Any) -> Any:
        return layer(x)

    first = train(x)
    assert layer.built and layer.seen.shape == (4, 3) and layer.kept[0].tolist() == [1.0, 1.0]
    assert list(layer.parts) == ["part0", "part1"] and len(layer.trainable_variables) == 4
    assert all(part.built for part in layer.parts.values())
    np.testing.assert_allclose(layer(x), first, rtol=1e-6)
    layer.parts["part0"].kernel.assign_add(tf.ones((3, 2)))
    np.testing.assert_allclose(train(x), first + 3.0, rtol=1e-6)
    model = tf.keras.Sequential([tf.keras.Input((3,)), layer])
    np.testing.assert_allclose(model.predict(np.ones((4, 3)), verbose=0), layer(x), rtol=1e-6)


@pytest.mark.both_generations
def test_layers_built_by_the_first_call_cause_no_retracing() -> None:
    layers, traced = [tf.keras.layers.Dense(8), tf.keras.layers.Dense(10)], {"number": 0}
    optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def step(x: Any) -> Any:
        traced["number"] += 1
        with tf.GradientTape() as tape:
            out = layers[1](layers[0](x))
            loss = tf.reduce_mean(out**2)
        variables = [*layers[0].trainable_variables, *layers[1].trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @two
    def train(x: Any) -> float:
        layers[1](layers[0](x))
        return float(step(x))

    losses, after = [], []
    for _ in range(3):
        losses.append(train(tf.ones((4, 3))))
        after.append(traced["number"])
    assert after[0] == after[1] == after[2]
    assert losses[0] > losses[1] > losses[2]
