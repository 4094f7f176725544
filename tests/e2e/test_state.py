"""`fit`, `fit(num_processes=2)` and `fit` in a row equal one long `fit`; nothing leaks."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import TOLERANCE, assert_same_history, assert_same_state, optimizer_state

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model, Sequential, nano
from nanotf.pool import warm

L = tf.keras.layers
KERAS_3 = is_keras_3()
ROWS, BATCH = 46, 12  # a last batch of 10 rows


def data() -> dict[str, Any]:
    floatx = tf.keras.backend.floatx()
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(floatx)
    y = np.tanh(x.sum(1, keepdims=True))
    return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "verbose": 0}


def dense(optimizer: Any, *more: Any) -> Any:
    tf.keras.utils.set_random_seed(4)
    model = Sequential([L.Input((4,)), L.Dense(5, activation="tanh"), *more, L.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae", tf.keras.metrics.RootMeanSquaredError()])
    return model


def in_a_row(model: Any, processes: tuple[int | None, ...], **arguments: Any) -> dict[str, Any]:
    """Concatenates the histories of several `fit`s of one epoch."""
    history: dict[str, Any] = {}
    for number in processes:
        for name, values in model.fit(**data(), **arguments, num_processes=number).history.items():
            history.setdefault(name, []).extend(values)
    return history


O = tf.keras.optimizers  # noqa: E741
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: O.Adam(0.01, amsgrad=True),
    "rmsprop": lambda: O.RMSprop(0.005, momentum=0.5, centered=True),
    "decayed": lambda: O.Adam(O.schedules.ExponentialDecay(0.05, 3, 0.7)),
    "legacy": lambda: O.legacy.Adam(0.01, decay=0.1),
}


def test_jobs_write_their_states_to_the_same_memory() -> None:
    """Runs a large job, a smaller job, and a job that is larger than both."""

    def memory() -> Any:
        assert warm._pool is not None
        return warm._pool._state_block

    one, many = dense("adam"), dense("adam")
    x, y = data()["x"], data()["y"]
    wide = Sequential([L.Input((4,)), L.Dense(50_000), L.Dense(1)])
    wide.compile("sgd", "mse")
    history = in_a_row(many, (2, 2))
    first = memory()
    many.evaluate(x, y, num_processes=2, verbose=0)
    assert memory() is first
    wide.fit(x, y, num_processes=2, verbose=0)
    assert memory().nbytes >= 2 * 4 * 250_000
    largest = memory()
    for name, values in in_a_row(many, (2,)).items():
        history[name].extend(values)
    assert memory() is largest
    assert_same_history(history, in_a_row(one, (None, None, None)))
    assert_same_state(many, one)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.both_generations
def test_three_fits_are_one_long_fit(float64: None, name: str) -> None:
    if name == "legacy" and KERAS_3:
        pytest.skip("Keras 3 has no such optimizers")
    model, long = dense(OPTIMIZERS[name]()), dense(OPTIMIZERS[name]())
    found = in_a_row(model, (None, 2, None))
    assert_same_history(found, long.fit(**data(), epochs=3).history)
    assert_same_state(model, long)
    ours, theirs = model.get_metrics_result(), long.get_metrics_result()
    assert list(ours) == list(theirs)
    for metric, value in theirs.items():
        np.testing.assert_allclose(float(ours[metric]), float(value), rtol=TOLERANCE["float64"])


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.thorough
def test_averages_of_weights(float64: None, every: int | None) -> None:
    """Keras assigns the averages at the end of each `fit`, so three fits differ from one."""

    def make() -> Any:
        return dense(O.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=every))

    model, plain = make(), make()
    found = in_a_row(model, (None, 2, 2, None))
    assert_same_history(found, in_a_row(plain, (None,) * 4))
    assert_same_state(model, plain)


@pytest.mark.both_generations
def test_loss_scale_continues() -> None:
    """Its scale doubles after some steps, and an overflow halves it in the second `fit`."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    models = []
    for processes in ((None, 2, None), (None,) * 3):
        inner = O.SGD(0.05)
        scaled: Any = (
            O.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3)
            if KERAS_3
            else tf.keras.mixed_precision.LossScaleOptimizer(
                inner, initial_scale=2.0**10, dynamic_growth_steps=3
            )
        )
        model = dense(scaled)
        in_a_row(model, processes[:1])
        weights = np.ones(ROWS)
        weights[15] = 1e9  # its gradient is infinite in float16
        in_a_row(model, processes[1:2], sample_weight=weights)
        in_a_row(model, processes[2:])
        models.append(model)
    found, plain = models
    names = ("step_counter", "dynamic_scale") if KERAS_3 else ("dynamic_counter", "loss_scale")
    for name in names:
        ours, theirs = (float(np.asarray(getattr(m.optimizer, name))) for m in (found, plain))
        assert ours == theirs, name
    assert int(found.optimizer.iterations.numpy()) == int(plain.optimizer.iterations.numpy())
    for ours, theirs in zip(found.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=2e-3)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no variables for seeds that are always used")
@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no auto_scale_loss")
def test_a_loss_that_must_not_be_scaled() -> None:
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    expected, found = dense("sgd"), dense("sgd")
    for model in (expected, found):
        model.compile("sgd", "mse", auto_scale_loss=False)
    in_a_row(expected, (None,))
    in_a_row(found, (2,))
    assert type(found.optimizer) is tf.keras.optimizers.SGD
    assert len(found.optimizer.variables) == len(expected.optimizer.variables)


class Weightless(Model):
    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs if training else 0 * inputs


@pytest.mark.filterwarnings("ignore:.*trainable weights")
def test_a_model_without_variables() -> None:
    model = Weightless()
    model.compile("sgd", "mse")
    x, y = np.ones((20, 1), "float32"), np.zeros((20, 1), "float32")
    arguments = {"batch_size": 8, "verbose": 0, "num_processes": 2}
    assert model.fit(x, y, **arguments).history == {"loss": [1.0]}
    assert model.evaluate(x, y, **arguments) == 0.0
    assert not model.predict(x, **arguments).any()


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 keeps its seeds beside the model")
def test_seeds_advance_as_in_one_process() -> None:
    def seeds(processes: tuple[int | None, ...]) -> list[np.ndarray]:
        tf.keras.utils.set_random_seed(5)  # the dropout draws its seed from this one
        model = dense(O.SGD(0.1), L.Dropout(0.4), L.GaussianNoise(0.1, seed=3))
        in_a_row(model, processes)
        return [np.asarray(v) for v in model.non_trainable_variables]

    found, plain = seeds((None, 2, None)), seeds((None, None, None))
    assert len(found) == 2
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _without_seed() -> list[float]:
    """Returns numbers of Keras 3's own generator, and a layer's initial weights."""
    layer = L.Dense(1)  # Keras 2 has a separate generator for these
    layer.build((None, 3))
    drawn = np.ravel(layer.get_weights()[0]).tolist()
    return [*drawn, float(tf.keras.random.uniform([]))] if KERAS_3 else drawn


class Scripted(Model):
    """A class with seeds and weights that workers rebuild, and that this process first tries."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.out = L.Dense(8), L.Dropout(0.5), L.Dense(1)
        self.noise = _without_seed()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.hidden(inputs), training=training))


@pytest.mark.both_generations
def test_random_numbers_continue_as_in_one_process() -> None:
    def drawn(processes: int | None) -> list[float]:
        tf.keras.utils.set_random_seed(5)
        model = Scripted()
        model.build((None, 3))
        model.compile("sgd", "mse", metrics=[tf.keras.metrics.MeanSquaredError()])
        x = np.ones((8, 3), "float32")
        model.fit(x, x[:, :1], shuffle=False, verbose=0, num_processes=processes)
        model.evaluate(x, x[:, :1], verbose=0, num_processes=processes)
        model.predict(x, verbose=0, num_processes=processes)
        numbers = [random.random(), float(np.random.random()), float(tf.random.uniform([]))]
        return [*numbers, *_without_seed()]

    assert drawn(2) == drawn(None)


class Uncertain(Model):
    """Drops values in predictions, too: a Monte-Carlo dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = L.Dropout(0.5)

    def call(self, inputs: Any) -> Any:
        return self.drop(inputs, training=True)


@pytest.mark.both_generations
def test_predictions_draw_anew() -> None:
    ones, found = np.ones((8, 50), "float32"), []
    for processes in (None, 2):
        tf.keras.utils.set_random_seed(1)
        model = Uncertain()
        outputs = [
            model.predict(ones, batch_size=4, verbose=0, num_processes=processes) for _ in range(3)
        ]
        found.append(outputs)
    np.testing.assert_array_equal(found[1], found[0])
    halves = [output[:4] for output in outputs] + [output[4:] for output in outputs]
    for i, one in enumerate(halves):
        for other in halves[i + 1 :]:
            assert 0.3 < np.mean(one != other) < 0.7, "every batch of every call draws new numbers"
    if KERAS_3:
        plain = Uncertain()
        before = np.asarray(model.variables[0])
        plain.predict(ones, batch_size=4, verbose=0)
        steps = np.asarray(plain.variables[0])[1]
        model.predict(ones, batch_size=4, verbose=0, num_processes=2)
        assert np.asarray(model.variables[0])[1] - before[1] == steps


@pytest.mark.both_generations
def test_learning_rate_and_weights_changed_between_fits(float64: None) -> None:
    models = []
    for processes in (2, None):
        model = dense(O.Adam(0.01))
        for rate in (0.05, 0.001):
            model.optimizer.learning_rate = rate
            model.layers[0].bias.assign(np.full(5, rate))
            in_a_row(model, (processes,))
        if KERAS_3:
            model.optimizer.learning_rate.assign(0.02)
        else:
            tf.keras.backend.set_value(model.optimizer.learning_rate, 0.02)
        in_a_row(model, (processes,))
        models.append(model)
    assert_same_state(*models)
    rates = [float(np.asarray(model.optimizer.learning_rate)) for model in models]
    np.testing.assert_allclose(rates, 0.02)


@pytest.mark.both_generations
def test_single_batches_between_fits(float64: None) -> None:
    """`train_on_batch` and `test_on_batch` change weights, slots and metrics for later fits."""
    results = []
    for processes in (2, None):
        model = dense(O.Adam(0.01))
        x, y = data()["x"], data()["y"]
        said = [model.train_on_batch(x[:7], y[:7])]
        in_a_row(model, (processes,))
        said += [model.train_on_batch(x[:7], y[:7]), model.test_on_batch(x[:5], y[:5])]
        model.reset_metrics()
        said += [model.test_on_batch(x[:5], y[:5], return_dict=True)["mae"]]
        in_a_row(model, (processes,))
        results.append((model, said, model.predict_on_batch(x[:3])))
    (found, ours, predicted), (plain, theirs, expected) = results
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE["float64"])
    np.testing.assert_allclose(predicted, expected, rtol=1e-9)
    assert_same_state(found, plain)


def test_a_new_optimizer_for_the_same_model(float64: None) -> None:
    models = []
    for processes in (2, None):
        model = dense(O.SGD(0.1, momentum=0.9))
        in_a_row(model, (processes,))
        model.compile(O.RMSprop(0.01), "mae")
        in_a_row(model, (processes,))
        model.compile(O.SGD(0.1, momentum=0.9), "mse")  # like the first, with its own slots
        in_a_row(model, (processes, processes))
        models.append(model)
    assert_same_state(*models)


@pytest.mark.thorough
def test_two_models_in_turn(float64: None) -> None:
    """Workers keep both models and do not confuse them; both have the same configuration."""
    models = [dense(O.Adam(0.01)) for _ in range(4)]
    models[1].layers[0].bias.assign(np.ones(5))
    models[3].layers[0].bias.assign(np.ones(5))
    for _ in range(3):
        for model, processes in zip(models, (2, 2, None, None), strict=True):
            in_a_row(model, (processes,))
    assert_same_state(models[0], models[2])
    assert_same_state(models[1], models[3])
    assert not np.allclose(models[0].get_weights()[0], models[1].get_weights()[0])


@pytest.mark.thorough
@pytest.mark.both_generations
def test_layers_added_and_removed_between_fits(float64: None) -> None:
    models = []
    for processes in (2, None):
        model = dense(O.Adam(0.01))
        in_a_row(model, (processes,))
        model.add(L.Dense(3, activation="tanh", kernel_initializer="ones"))
        model.add(L.Dense(1, kernel_initializer="ones"))
        model.compile(O.Adam(0.01), "mse")
        in_a_row(model, (processes,))
        model.pop()
        model.compile(O.Adam(0.01), "mse")
        in_a_row(model, (processes,))
        models.append(model)
    assert_same_state(*models)
    assert models[0].predict(data()["x"], verbose=0).shape == (ROWS, 3)


@pytest.mark.thorough
def test_transfer_learning(float64: None) -> None:
    """Trains a frozen base under a new head; then the whole model, with a small learning rate."""
    models = []
    for processes in (2, None):
        tf.keras.utils.set_random_seed(4)
        # Keras 3 also passes `training` of the whole model's call to the base.
        normal = L.BatchNormalization(synchronized=True)
        base = tf.keras.Sequential(
            [L.Input((4,)), L.Dense(6, activation="tanh"), normal], name="base"
        )
        base.trainable = False
        inputs = L.Input((4,))
        model = Model(inputs, L.Dense(1)(base(inputs, training=False)))
        before = base.get_weights()
        model.compile(O.Adam(0.01), "mse")
        in_a_row(model, (processes,))
        for now, then in zip(base.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        base.trainable = True
        model.compile(O.Adam(0.001), "mse")
        in_a_row(model, (processes, processes))
        assert not np.array_equal(base.get_weights()[0], before[0])
        models.append(model)
    assert_same_state(*models)


@nano(num_processes=2)
def bytes_of_variables(one: Any, dataset: Any) -> int:
    """Returns the bytes of a worker's live variables."""
    variables = [found for found in gc.get_objects() if isinstance(found, tf.Variable)]
    # Without per-replica containers of other variables, and variables that have no value.
    real = [v for v in variables if not hasattr(v, "values") and bool(v.is_initialized())]
    return sum(v.shape.num_elements() * v.dtype.size for v in real)


@pytest.mark.thorough
def test_deleted_models_are_freed_in_workers_and_this_process() -> None:
    """Workers keep two models and at most 128 MiB of others; this process keeps none."""
    # A model's variables are 57 MiB in a worker, including its shard of the optimizer's.
    width = 1_500_000

    def large() -> Any:
        model = Sequential([L.Input((2,)), L.Dense(width), L.Dense(1, use_bias=False)])
        model.compile(O.Adam(), "mse")
        x = np.ones((2, 2), "float32")
        model.fit(x, x[:, :1], verbose=0, num_processes=2)
        return weakref.ref(model)

    def used() -> float:
        # Not the resident memory, in which malloc keeps freed memory.
        dataset = tf.data.Dataset.range(2).batch(2)
        return bytes_of_variables(tf.Variable(0.0), dataset) / 2**20

    models, sizes = [], []
    for _ in range(8):
        models.append(large())
        sizes.append(used())
    assert min(sizes) > 50, sizes
    assert max(sizes) < 250, sizes
    tf.keras.backend.clear_session()
    gc.collect()
    assert [model() for model in models] == [None] * 8


@pytest.mark.both_generations
def test_graphs_of_dropped_models_are_freed_in_workers() -> None:
    """Workers keep two models; nothing else may keep a traced step, nor its custom gradients."""

    @nanotf.nano(num_processes=2)
    def kept() -> tuple[int, int]:
        from tensorflow.python.framework import ops
        from tensorflow.python.framework.func_graph import FuncGraph

        gc.collect()
        graphs = sum(isinstance(each, FuncGraph) for each in gc.get_objects())
        return graphs, len(ops.gradient_registry._registry)

    counts = []
    for _ in range(5):
        in_a_row(dense("adam"), (2,))
        counts.append(kept())
    assert counts[2:] == [counts[2]] * 3, counts


def test_an_optimizer_of_other_variables_is_refused() -> None:
    """Raises Keras's error if there is one, or nanotf's error if Keras would use its old trace."""
    optimizer = O.Adam(0.01)
    first, second = dense(optimizer), dense("sgd")
    in_a_row(first, (2,))
    second.compile(optimizer, "mse")
    with pytest.raises((ValueError, KeyError), match=r"[Uu]nknown variable|cannot recognize"):
        in_a_row(second, (2,))
    first.layers[0].trainable = False
    with pytest.raises(nanotf.errors.ModelError, match=r"Received: .* with 2 trainable.*compile"):
        in_a_row(first, (2,))
    first.compile(O.Adam(0.01), "mse")
    in_a_row(first, (2,))


@pytest.mark.both_generations
def test_optimizer_state_is_complete_after_the_first_fit(float64: None) -> None:
    """After the first `fit(num_processes=2)`, the user's own optimizer has the slots."""
    optimizer = O.Adam(0.01)
    model = dense(optimizer)
    in_a_row(model, (2,))
    assert model.optimizer is optimizer
    state = optimizer_state(model)
    assert sum(int(np.any(value != 0)) for value in state[1:]) >= 8
