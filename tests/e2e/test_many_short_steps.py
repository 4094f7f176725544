"""`fit`s of many short steps; workers run several steps in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import fit_both

from nanotf.keras import Model, Sequential, nano
from nanotf.wire import timing

L = tf.keras.layers
X = np.random.default_rng(0).normal(size=(46, 4))
Y = X.sum(1, keepdims=True) * [1.0, 2.0, 3.0]
EPOCHS = 4  # of 23 steps

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.both_generations]


@nano(num_processes=2)
def _limits(most_seconds: float, steps_to_come: int) -> tuple[float, int]:
    """Changes when workers run several steps in one call; returns the limits before."""
    from nanotf.compat import run_ahead

    before = run_ahead.MOST_SECONDS, run_ahead.STEPS_TO_COME
    run_ahead.MOST_SECONDS, run_ahead.STEPS_TO_COME = most_seconds, steps_to_come
    return before


@pytest.fixture(autouse=True)
def _several_steps_pay() -> Iterator[None]:
    """Makes steps count as fast, however busy the machine is, and few of them as many."""
    before = _limits(1e6, 40)
    yield
    _limits(*before)


def _made(model: Any, *metrics: str) -> Any:
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=list(metrics) or None)
    return model


def _example(*more: Any) -> Any:
    tf.keras.utils.set_random_seed(4)
    return _made(Sequential([L.Input((4,)), L.Dense(5, "tanh"), *more, L.Dense(3)]), "mae")


def _executions(model: Any) -> tuple[int, int]:
    """Returns the number of training executions, and the number of their steps."""
    times = model.history.nanotf.times[0]
    steps = sum(one.executions for one in times.passes if one.kind == "train")
    kinds = times.steps[0 :: timing.STEP_COLUMNS]
    return kinds.count(0), steps


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_arrays_and_datasets(kind: str) -> None:
    data = {"x": X, "y": Y, "batch_size": 2}
    if kind == "dataset":
        data = {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)}
    found, _ = fit_both(_example, epochs=EPOCHS, validation_data=(X[:10], Y[:10]), **data)
    executions, steps = _executions(found)
    assert steps == 23 * EPOCHS
    assert executions < steps / 2


@pytest.mark.thorough
def test_dropout() -> None:
    """Its random numbers continue; in Keras 2 the graph keeps their state."""
    fit_both(lambda: _example(L.Dropout(0.2)), x=X, y=Y, batch_size=2, epochs=EPOCHS)


def test_callback_that_looks_at_every_batch() -> None:
    seen: list[Any] = []

    def make() -> Any:
        seen.append([])
        return _example()

    def note(batch: int, logs: Any) -> None:
        seen[-1].append((batch, logs["loss"]))

    callback = tf.keras.callbacks.LambdaCallback(on_train_batch_end=note)
    for processes in (None, 2):
        make().fit(
            X, Y, batch_size=2, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[callback],
            num_processes=processes,
        )  # fmt: skip
    assert len(seen[0]) == len(seen[1]) == 23 * EPOCHS
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-10)


def test_a_callback_that_stops_an_epoch_at_its_begin() -> None:
    """Keras's loop ends after one step."""

    class Stops(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 2

    fit_both(_example, x=X, y=Y, batch_size=2, epochs=9, callbacks=[Stops()])


class OwnStep(Model):  # type: ignore[misc]
    """Returns the step's own value, not a mean: the epoch's log is the last step's."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"of_this_step": loss}


def test_the_users_own_step() -> None:
    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        inputs = tf.keras.Input((4,))
        return _made(OwnStep(inputs, L.Dense(3)(inputs)))

    found, _ = fit_both(make, x=X, y=Y, batch_size=2, epochs=EPOCHS)
    executions, steps = _executions(found)
    assert executions < steps == 23 * EPOCHS


def test_the_users_own_train_function() -> None:
    """Workers call the user's function for every step."""

    class OwnFunction(Model):  # type: ignore[misc]
        def make_train_function(self, force: bool = False) -> Any:
            super().make_train_function(force)
            stock = self.train_function

            def function(iterator: Any) -> Any:
                return {**stock(iterator), "own": 1.0}

            self.train_function = function
            return function

    def make() -> Any:
        tf.keras.utils.set_random_seed(4)
        inputs = tf.keras.Input((4,))
        return _made(OwnFunction(inputs, L.Dense(3)(inputs)))

    model = make()
    model.fit(X, Y, batch_size=2, epochs=EPOCHS, verbose=0, num_processes=2)
    executions, steps = _executions(model)
    assert executions == steps == 23 * EPOCHS
