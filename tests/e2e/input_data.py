"""Data, models and comparisons, for the tests of the data that `fit` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from parity import assert_same_history, digits, weights
from test_parity import RowSums

from nanotf.compat.versions import is_keras_3
from nanotf.keras import Sequential

L = tf.keras.layers
KERAS_3 = is_keras_3()
PyDataset: Any = tf.keras.utils.PyDataset if KERAS_3 else tf.keras.utils.Sequence
ROWS, BATCH = 130, 40


def table_of_classes(rows: int = 70) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 4)), random.integers(0, 3, rows)


def linear_classifier() -> Any:
    tf.keras.utils.set_random_seed(2)
    model = Sequential([L.Input((4,)), L.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def fit_both_on_new_data(
    make: Callable[[], Any], data: Callable[[], dict[str, Any]], **arguments: Any
) -> None:
    """Works like `parity.fit_both`, for data that can be used once."""
    arguments = {"verbose": 0, "epochs": 2, **arguments}
    before = make().fit(**data(), **arguments)  # `make` sets the seed
    after = make().fit(**data(), **arguments, num_processes=2)
    assert after.epoch == before.epoch
    assert_same_history(after.history, before.history)


def assert_rows_once(data: dict[str, Any], rows: int, epochs: int = 3) -> None:
    """Asserts that each of the rows 1 to `rows` is used once an epoch: their powers add up."""
    tf.keras.utils.set_random_seed(1)
    model = Sequential([L.Input((1,)), L.Dense(1)])
    sums = [RowSums(power, name=f"sum{power}") for power in (0, 1, 2, 3)]
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=sums)
    history = model.fit(**data, epochs=epochs, verbose=0, num_processes=2).history
    ids = np.arange(1, rows + 1, dtype="float64")
    for power in range(4):
        np.testing.assert_allclose(history[f"sum{power}"], np.sum(ids**power), rtol=1e-12)


def batches_of_digits(form: str = "x, y", passes: int = 1) -> Iterator[Any]:
    x, y = digits(ROWS)
    w = weights(ROWS)
    for _ in range(passes):
        for first in range(0, ROWS, BATCH):
            part = slice(first, first + BATCH)
            if form == "x, y":
                yield x[part], y[part]
            else:
                yield x[part], y[part], w[part]


class Batches(PyDataset):
    """Digits, with a record of the hooks that Keras calls."""

    def __init__(self, rows: int = ROWS, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.x, self.y = digits(rows)
        self.diary: list[str] = []
        self.pids: set[int] = set()

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int) -> Any:
        self.pids.add(os.getpid())
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]

    def on_epoch_begin(self) -> None:
        self.diary.append("begin")

    def on_epoch_end(self) -> None:
        self.diary.append("end")
