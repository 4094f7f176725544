"""A small model, data and a recording callback, for the tests of callbacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from parity import digits

from nanotf.keras import Sequential

L = tf.keras.layers
FIT = {"batch_size": 50, "shuffle": False}


def losing(*metrics: Any, optimizer: Any = None) -> Any:
    """Returns a small compiled model with stateful metrics, the same at every call."""
    tf.keras.utils.set_random_seed(5)
    model = Sequential(
        [L.Input((8, 8, 1)), L.Flatten(), L.Dense(3, activation="softmax", name="last")],
        name="small",
    )
    model.compile(
        optimizer if optimizer is not None else tf.keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        metrics=list(metrics),
    )
    return model


def three_digits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = digits(rows)
    return x, y % 3


class Watch(tf.keras.callbacks.Callback):
    """Records logs, weights and step count at every batch hook."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []
        self.state: list[tuple[int, float]] = []

    def _note(self, logs: Any) -> None:
        steps = int(self.model.optimizer.iterations.numpy())
        self.state.append((steps, float(sum(np.sum(w) for w in self.model.get_weights()))))
        if logs:
            self.logs.append(dict(logs))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(logs)


def run_both(make: Any, callbacks: Any, rows: int = 110, **arguments: Any) -> list[Any]:
    """Trains two equal models, with one process and with two.

    Args:
        make: makes a compiled model.
        callbacks: makes the list of callbacks.
        rows: int.
        **arguments: of `fit`.

    Returns:
        A list of both models, each with its callbacks in the attribute `callbacks`.
    """
    x, y = three_digits(rows)
    arguments = {"batch_size": 20, "shuffle": False, "epochs": 2, "verbose": 0, **arguments}
    results = []
    for processes in (None, 2):
        model = make()
        mine = callbacks()
        model.fit(x, y, **arguments, callbacks=mine, num_processes=processes)
        results.append((model, mine))
    return results
