"""Keras's own `fit`, without workers, runs several short steps in one call: with equal results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state

from nanotf import keras
from nanotf.compat import run_ahead

L = tf.keras.layers
X = np.random.default_rng(0).normal(size=(47, 4))
Y = X.sum(1, keepdims=True) * [1.0, 2.0, 3.0]
STEPS = 24  # of an epoch; the last has one row
EPOCHS = 4

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.both_generations]


@pytest.fixture(autouse=True)
def _several_steps_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes steps count as fast, however busy the machine is, and few of them as many."""
    monkeypatch.setattr(run_ahead, "MOST_SECONDS", 1e6)
    monkeypatch.setattr(run_ahead, "STEPS_TO_COME", 40)


def _made(sequential: Any, *more: Any, **compiled: Any) -> Any:
    tf.keras.utils.set_random_seed(4)
    model = sequential([L.Input((4,)), L.Dense(5, "tanh"), *more, L.Dense(3)])
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compiled)
    return model


def _runs_ahead(model: Any) -> bool:
    """Returns True if the model's last execution had several steps."""
    return bool(model.train_function._nanotf_ahead.count > 1)


def _fit(model: Any, *data: Any, **arguments: Any) -> Any:
    given = {"batch_size": 2, "epochs": EPOCHS, "verbose": 0, **arguments}
    tf.keras.utils.set_random_seed(5)
    return model.fit(*(data or (X, Y)), **given)


def _assert_equal(*more: Any, **arguments: Any) -> Any:
    """Trains with Keras's class and nanotf's; returns the second model."""
    plain, ours = _made(tf.keras.Sequential, *more), _made(keras.Sequential, *more)
    expected, found = _fit(plain, **arguments), _fit(ours, **arguments)
    assert_same_history(found.history, expected.history)
    assert_same_state(ours, plain)
    return ours


def test_shuffled_arrays_with_validation() -> None:
    assert _runs_ahead(_assert_equal(validation_data=(X[:10], Y[:10])))


def test_the_progress_bar_lets_steps_run_ahead(capsys: Any) -> None:
    assert _runs_ahead(_assert_equal(verbose=1))
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().out


def test_a_dataset_that_ends_before_its_steps() -> None:
    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)

    plain, ours = _made(tf.keras.Sequential), _made(keras.Sequential)
    for model in (plain, ours):
        # Longer epochs than the data: the second has 8 batches, and training ends.
        model.fit(data().repeat(2), epochs=3, steps_per_epoch=40, verbose=0)
    assert_same_state(ours, plain)


def test_epochs_that_a_callback_ends() -> None:
    class Ends(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 2

    assert _runs_ahead(_assert_equal(epochs=9, callbacks=[Ends()]))


def test_callbacks_that_look_at_steps() -> None:
    seen: list[Any] = []
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))
    )
    ours = _assert_equal(callbacks=[note])
    assert not _runs_ahead(ours)
    assert len(seen) == 2 * STEPS * EPOCHS
    np.testing.assert_allclose(seen[: len(seen) // 2], seen[len(seen) // 2 :], rtol=1e-10)


def test_callbacks_in_lists_look_at_steps_too() -> None:
    seen: list[float] = []
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"]))
    )
    _assert_equal(callbacks=[[note]])
    np.testing.assert_allclose(seen[: len(seen) // 2], seen[len(seen) // 2 :], rtol=1e-10)


def test_a_callback_that_stops_an_epoch_at_its_begin() -> None:
    """Keras's loop ends after one step."""

    class Stops(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 2

    _assert_equal(epochs=9, callbacks=[Stops()])


def test_a_fit_after_one_that_was_interrupted() -> None:
    """No later step gets the result of one that the first fit has made ahead."""

    class Interrupts(tf.keras.callbacks.Callback):  # type: ignore[misc]
        nanotf_needs = "progress"

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations > batch + 1:  # it has run ahead
                raise KeyboardInterrupt

    model = _made(keras.Sequential)
    with pytest.raises(KeyboardInterrupt):
        _fit(model, callbacks=[Interrupts()], epochs=1, steps_per_epoch=60)
    before = int(model.optimizer.iterations)
    _fit(
        model,
        callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)],
    )
    assert int(model.optimizer.iterations) == before + STEPS * EPOCHS


def test_single_batches_after_a_fit() -> None:
    plain, ours = _made(tf.keras.Sequential), _made(keras.Sequential)
    for model in (plain, ours):
        _fit(model)
        model.train_on_batch(X[:5], Y[:5])
    assert_same_state(ours, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [{"steps_per_execution": 3}, {"run_eagerly": True}])
def test_what_keras_runs_otherwise_stays_keras_own(compiled: Any) -> None:
    ours = _made(keras.Sequential, **compiled)
    _fit(ours, epochs=2)
    assert not hasattr(ours.train_function, "_nanotf_ahead")


def test_the_step_is_traced_once() -> None:
    traces = []

    def make(base: Any) -> Any:
        class Counts(base):  # type: ignore[misc]
            def train_step(self, data: Any) -> Any:
                traces.append(base)
                return super().train_step(data)

        tf.keras.utils.set_random_seed(4)
        inputs = tf.keras.Input((4,))
        model = Counts(inputs, L.Dense(3)(inputs))
        model.compile("sgd", "mse")
        return model

    even = X[:46], Y[:46]
    plain, ours = make(tf.keras.Model), make(keras.Model)
    _fit(plain, *even), _fit(ours, *even)
    assert traces.count(keras.Model) == traces.count(tf.keras.Model)
    assert _runs_ahead(ours)


def batches() -> Iterator[Any]:
    """Yields batches without end."""
    while True:
        for first in range(0, 46, 2):
            yield X[first : first + 2], Y[first : first + 2]


def test_a_generator_is_read_as_far_as_keras_reads_it() -> None:
    plain, ours = _made(tf.keras.Sequential), _made(keras.Sequential)
    for model in (plain, ours):
        model.fit(batches(), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0)
    assert_same_state(ours, plain)
