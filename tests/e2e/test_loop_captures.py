"""Models, layers, variables and functions that a loop uses reach the workers and return trained."""

from __future__ import annotations

import importlib
import linecache
import pathlib
import sys
import types
from typing import Any

import cloudpickle
import loops
import numpy as np
import pytest
import tensorflow as tf
from compared_loops import OPTIMIZERS, assert_follows_one_process, train_both
from compared_loops import run_on as run_on
from loops import cross_entropy, dense, plain_step, plain_train

from nanotf.errors import ShippingError
from nanotf.keras import nano, nano_multiprocessing

L = tf.keras.layers


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

    assert_follows_one_process(run_on, program)
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
        train_both(run_on, OPTIMIZERS["adam"], model=make)
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

    train_both(run_on, OPTIMIZERS["adam"], model=make)


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
        train_both(run_on, step=cell["step"])
    finally:
        del linecache.cache[path]
