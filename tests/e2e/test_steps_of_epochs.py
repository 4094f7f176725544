"""Epochs and validation have the steps of plain Keras, whatever the data and the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state, fit_both
from trainer_model import L, X, Y, example

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Model

pytestmark = pytest.mark.usefixtures("float64")


class _Params(tf.keras.callbacks.Callback):
    """Stores its parameters at the beginning of training."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun = dict(self.params)


@pytest.fixture
def limits() -> Iterator[Any]:
    """Sets the limits for debugging runs in Keras's `config`."""
    config = getattr(tf.keras, "config", None)
    if not hasattr(config, "set_max_epochs"):
        pytest.skip("this Keras has none")
    config.set_max_epochs(2)
    config.set_max_steps_per_epoch(3)
    yield config
    config.set_max_epochs(None)
    config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_limits_for_debugging_runs(limits: Any) -> None:
    def run(processes: int | None) -> list[Any]:
        found: list[Any] = []
        for data in (
            {"x": X[:32], "y": Y[:32], "batch_size": 8, "shuffle": False},
            {"x": tf.data.Dataset.from_tensor_slices((X[:32], Y[:32])).batch(8)},
        ):
            model = example(metrics=["mae"])
            callback = _Params()
            with pytest.warns(UserWarning, match="Limiting epochs to 2") as caught:
                history = model.fit(
                    **data, epochs=4, verbose=0, callbacks=[callback], num_processes=processes,
                    validation_data=(X[:32], Y[:32]), validation_batch_size=8,
                )  # fmt: skip
            assert any("Limiting steps_per_epoch to 3" in str(w.message) for w in caught)
            found += history.history.values()
            found.append([callback.begun["epochs"], callback.begun["steps"]])
            found.append([int(model.optimizer.iterations)])
        found.append(model.evaluate(X[:32], Y[:32], 8, verbose=0, num_processes=processes))
        found.append(model.predict(X[:32], 8, verbose=0, num_processes=processes).shape)
        return found

    for ours, keras in zip(run(2), run(None), strict=True):
        np.testing.assert_allclose(ours, keras, rtol=1e-4)
    limits.set_max_epochs(None)
    limits.set_max_steps_per_epoch(None)
    model = example(metrics=["mae"])
    history = model.fit(X[:32], Y[:32], 8, 3, verbose=0, num_processes=2)
    assert len(history.epoch) == 3
    assert int(model.optimizer.iterations) == 12


@pytest.mark.parametrize("steps_per_execution", [1, 3, 8])
@pytest.mark.both_generations
def test_steps_per_execution(steps_per_execution: int) -> None:
    """Batch hooks run once per execution, with Keras's indices."""
    calls: dict[int, list[Any]] = {}

    def make() -> Any:
        return example(metrics=["mae"], steps_per_execution=steps_per_execution)

    models = []
    for processes in (None, 2):
        seen = calls.setdefault(processes or 1, [])
        model = make()
        callback = tf.keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, seen=seen: seen.append(batch),
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append((batch, logs["mae"])),
        )
        model.fit(
            X[:32], Y[:32], batch_size=4, epochs=2, shuffle=False, verbose=0,
            callbacks=[callback], num_processes=processes,
        )  # fmt: skip
        models.append(model)
    assert_same_state(models[1], models[0])
    assert_same_history(models[1].history.history, models[0].history.history)
    batches = [[c[0] if isinstance(c, tuple) else c for c in calls[n]] for n in (1, 2)]
    assert batches[1] == batches[0]
    values = [[c[1] for c in calls[n] if isinstance(c, tuple)] for n in (1, 2)]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-10)


@pytest.mark.parametrize("kind", ["dataset", "generator"])
@pytest.mark.thorough
def test_steps_per_execution_of_data_of_unknown_length(kind: str) -> None:
    """Executions of three steps over five batches: the last execution is cut short."""
    if kind == "dataset" and not is_keras_3():
        pytest.skip("Keras 2 requires the number of steps")

    def data() -> Any:
        batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]
        if kind == "generator":
            return (batch for _ in range(2) for batch in batches)
        pairs = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40]))
        return pairs.batch(8).filter(lambda *_: True)

    results = []
    for processes in (None, 2):
        model = example(metrics=["mae"], steps_per_execution=3)
        steps = 5 if kind == "generator" else None
        model.fit(data(), steps_per_epoch=steps, epochs=2, verbose=0, num_processes=processes)
        results.append(model)
    assert_same_history(results[1].history.history, results[0].history.history)
    assert_same_state(results[1], results[0])


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.thorough
def test_dataset_of_unknown_length(steps: int | None) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).filter(lambda *_: True)
    fit_both(lambda: example(metrics=["mae"]), x=dataset, steps_per_epoch=steps, epochs=1)


@pytest.mark.thorough
def test_endless_dataset_for_training_and_validation() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).repeat()
    fit_both(
        example, x=dataset, steps_per_epoch=5, epochs=3, validation_data=dataset,
        validation_steps=2,
    )  # fmt: skip


@pytest.mark.thorough
def test_validation_with_a_short_last_batch() -> None:
    fit_both(
        lambda: example(metrics=["mae"]), x=X, y=Y, batch_size=12,
        validation_data=(X[:13], Y[:13]), validation_batch_size=4,
    )  # fmt: skip


def test_validation_of_some_steps() -> None:
    fit_both(
        example, x=X, y=Y, batch_size=12, validation_data=(X[:20], Y[:20]),
        validation_batch_size=4, validation_steps=2,
    )  # fmt: skip


@pytest.mark.parametrize("batches", [4, 6])
def test_fewer_batches_than_the_epochs_need(batches: int, recwarn: pytest.WarningsRecorder) -> None:
    """A generator ends in the second of three epochs of three steps: training ends there."""

    def generator() -> Any:
        return ((X[:8] + i, Y[:8]) for i in range(batches))

    results = []
    for processes in (None, 2):
        model = example()
        history = model.fit(
            generator(), steps_per_epoch=3, epochs=3, verbose=0, num_processes=processes
        )
        results.append((model, history))
    (plain, expected), (model, found) = results
    assert found.epoch == expected.epoch
    assert_same_history(found.history, expected.history)
    assert_same_state(model, plain)


def test_a_training_step_is_traced_once_for_all_epochs_and_fits() -> None:
    """Counted by Python's side effects in a worker, which a metric of the model reports."""

    class Traced(Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = L.Dense(3)
            self.traces = 0

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> Any:
            self.traces += 1
            return {**super().train_step(data), "traces": tf.constant(float(self.traces))}

    model = Traced()
    model.compile("sgd", "mse")
    fit: dict[str, Any] = {"batch_size": 12, "verbose": 0, "num_processes": 2}
    first = model.fit(X[:36], Y[:36], epochs=3, **fit).history["traces"]
    again = model.fit(X[:36], Y[:36], **fit).history["traces"]
    assert first[0] == first[-1]
    assert again == first[:1]
