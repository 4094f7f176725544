"""Callbacks get the logs, change the model and stop training as in plain Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state
from trainer_model import FLOAT, L, X, Y, example

from nanotf.keras import Model

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.both_generations
def test_names_in_the_logs_of_every_hook() -> None:
    names: dict[str, set[tuple[str, ...]]] = {}

    def hook(name: str) -> Any:
        def call(self: Any, *arguments: Any, **named: Any) -> None:
            logs = named.get("logs", arguments[-1] if arguments else None)
            names.setdefault(name, set()).add(tuple(sorted(logs)))  # never None

        return call

    hooks = [
        f"on_{what}_{when}"
        for what in ("train", "test", "epoch", "train_batch", "test_batch")
        for when in ("begin", "end")
    ]
    callback = type("Names", (tf.keras.callbacks.Callback,), {name: hook(name) for name in hooks})()
    example(metrics=["mae"]).fit(
        X, Y, batch_size=12, verbose=0, validation_split=0.3, callbacks=[callback], num_processes=2
    )
    of_step = {("loss", "mae")}
    of_epoch = {("loss", "mae", "val_loss", "val_mae")}
    assert names == {
        **{name: {()} for name in hooks if name.endswith("_begin")},
        "on_train_batch_end": of_step,
        "on_test_batch_end": of_step,
        "on_test_end": of_step,
        "on_epoch_end": of_epoch,
        "on_train_end": of_epoch,
    }


@pytest.mark.both_generations
def test_a_callback_changes_the_state_between_batches() -> None:
    class Set(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.set_weights([np.full_like(w, 0.25) for w in self.model.get_weights()])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[-1].bias.assign(np.full(3, epoch, FLOAT))

    def run(processes: int | None) -> Any:
        model = example(metrics=["mae"])
        model.fit(
            X, Y, batch_size=12, epochs=2, verbose=0, shuffle=False, callbacks=[Set()],
            num_processes=processes,
        )  # fmt: skip
        return model

    plain, model = run(None), run(2)
    assert_same_state(model, plain)
    assert_same_history(model.history.history, plain.history.history)


class Counting(Model):  # type: ignore[misc]
    """A model with weights that only callbacks change."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(3)
        for name in ("train", "test", "predict"):
            weight = self.add_weight(name=name, shape=(), initializer="zeros", trainable=False)
            setattr(self, f"{name}_counter", weight)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class Counter(tf.keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls = {"train": 0, "test": 0, "predict": 0}

    def _count(self, name: str) -> None:
        getattr(self.model, f"{name}_counter").assign_add(1.0)
        self.calls[name] += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("test")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("predict")


@pytest.mark.thorough
def test_callbacks_count_in_the_model() -> None:
    model, callback = Counting(), Counter()
    model.compile("sgd", "mse")
    arguments: dict[str, Any] = {"verbose": 0, "callbacks": [callback], "num_processes": 2}
    model.fit(X[:16], Y[:16], batch_size=4, epochs=2, validation_data=(X[:6], Y[:6]), **arguments)
    assert callback.calls == {"train": 8, "test": 4, "predict": 0}
    counts = {name: float(np.asarray(getattr(model, f"{name}_counter"))) for name in callback.calls}
    assert counts == callback.calls
    model.evaluate(X[:8], Y[:8], batch_size=4, **arguments)
    model.predict(X[:12], batch_size=4, **arguments)
    assert callback.calls == {"train": 8, "test": 6, "predict": 3}
    counts = {name: float(np.asarray(getattr(model, f"{name}_counter"))) for name in callback.calls}
    assert counts == callback.calls


@pytest.mark.both_generations
def test_counts_of_an_endless_generator_of_validation_data() -> None:
    def endless() -> Any:
        while True:
            yield X[:2], Y[:2]

    model, callback = Counting(), Counter()
    model.compile("sgd", "mse")
    model.fit(
        endless(), validation_data=endless(), steps_per_epoch=3, validation_steps=4, verbose=0,
        callbacks=[callback], num_processes=2,
    )  # fmt: skip
    assert callback.calls == {"train": 3, "test": 4, "predict": 0}


class Stop(tf.keras.callbacks.Callback):
    """Stops at the third batch, and counts the hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.diary: list[str] = []

    def _note(self, name: str, batch: int | None = None) -> None:
        self.diary.append(name)
        if name == self.hook and batch == 2:
            self.model.stop_training = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch_begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch_end", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note("begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("end", batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("test", batch)

    def on_train_end(self, logs: Any = None) -> None:
        self._note("train_end")


@pytest.mark.parametrize("hook", ["begin", "end", "test", "epoch_end"])
@pytest.mark.both_generations
def test_a_callback_stops_training_where_keras_would(hook: str) -> None:
    results = []
    for processes in (None, 2):
        callback, model = Stop(hook), example()
        history = model.fit(
            X, Y, batch_size=12, epochs=5, verbose=0, shuffle=False, callbacks=[callback],
            validation_data=(X[:20], Y[:20]), validation_batch_size=5, num_processes=processes,
        )  # fmt: skip
        results.append((callback.diary, history, model))
    (theirs, expected, plain), (ours, found, model) = results
    assert ours == theirs
    assert found.epoch == expected.epoch
    assert_same_history(found.history, expected.history)
    assert_same_state(model, plain)
