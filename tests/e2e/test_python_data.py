"""Generators and PyDatasets give the numbers of one process, and are read as Keras reads them."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from input_data import (
    KERAS_3,
    Batches,
    L,
    PyDataset,
    assert_rows_once,
    batches_of_digits,
    fit_both_on_new_data,
    linear_classifier,
    table_of_classes,
)
from parity import assert_same_history, digits, small_cnn

import nanotf
from nanotf.compat import keras_common

# Keras makes a single queue for all processes that it starts, and keeps it.
_ADAPTERS = "trainers.data_adapters.py_dataset_adapter" if KERAS_3 else "utils.data_utils"
keras_common.source_module(_ADAPTERS).get_worker_id_queue()


# --------------------------------------------------------------------------------------- generators
@pytest.mark.parametrize("form", ["x, y", "x, y, w"])
@pytest.mark.both_generations
def test_generator(float64: None, form: str) -> None:
    fit_both_on_new_data(
        lambda: small_cnn(weighted=form == "x, y, w"),
        lambda: {"x": batches_of_digits(form, 3), "steps_per_epoch": 4},
    )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_generator_without_steps(float64: None) -> None:
    # Keras 3 continues with the two batches that it peeked at, Keras 2 with none.
    fit_both_on_new_data(small_cnn, lambda: {"x": batches_of_digits()})


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.both_generations
def test_generator_as_validation_data(float64: None) -> None:
    x, y = digits(80)
    # If batches differ, Keras's batches depend on how far TensorFlow reads ahead.
    fit_both_on_new_data(
        small_cnn,
        lambda: {"x": x, "y": y, "validation_data": _endlessly(x[:9], y[:9])},
        validation_steps=3,
    )


def _endlessly(x: Any, y: Any) -> Iterator[Any]:
    while True:
        yield x, y


@pytest.mark.thorough
def test_generator_of_dicts(float64: None) -> None:
    def model() -> Any:
        tf.keras.utils.set_random_seed(5)
        left, right = L.Input((4,), name="left"), L.Input((1,), name="right")
        joined = L.Concatenate()([left, right])
        outputs = {"a": L.Dense(1, name="a")(joined), "b": L.Dense(1, name="b")(joined)}
        made = nanotf.keras.Model({"left": left, "right": right}, outputs)
        made.compile(tf.keras.optimizers.SGD(0.1), {"a": "mse", "b": "mae"})
        return made

    def batches() -> Iterator[Any]:
        random = np.random.default_rng(3)
        while True:
            x, y = random.normal(size=(7, 4)), random.normal(size=(7, 1))
            yield {"left": x, "right": y}, {"a": y, "b": -y}

    fit_both_on_new_data(model, lambda: {"x": batches(), "steps_per_epoch": 5})


def test_generator_is_read_in_the_parent_and_not_far_ahead() -> None:
    read: list[int] = []

    def endless() -> Iterator[Any]:
        x, y = table_of_classes(16)
        for number in itertools.count():
            read.append(os.getpid())
            yield x + number, y

    generator = endless()
    linear_classifier().fit(generator, steps_per_epoch=5, epochs=2, verbose=0, num_processes=2)
    assert set(read) == {os.getpid()}
    assert len(read) == 10, "no batch beyond those that the epochs need"
    linear_classifier().fit(generator, steps_per_epoch=5, verbose=0, num_processes=2)
    assert 15 <= len(read) <= 17, "Keras peeks at two batches"


class _Stop(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 2


@pytest.mark.thorough
def test_training_that_stops_early_does_not_read_the_generator_further() -> None:
    read: list[int] = []

    def endless() -> Iterator[Any]:
        x, y = table_of_classes(16)
        for number in itertools.count():
            read.append(number)
            yield x, y

    linear_classifier().fit(
        endless(),
        steps_per_epoch=1000,
        epochs=2,
        verbose=0,
        callbacks=[_Stop()],
        num_processes=2,
    )
    # Three steps, three slots, and each worker's prefetched batches.
    assert 3 <= len(read) <= 12


@pytest.mark.thorough
def test_rows_of_a_generator_once_an_epoch(float64: None) -> None:
    def shuffled() -> Iterator[Any]:
        random = np.random.default_rng(0)
        for _ in range(3):
            ids = random.permutation(np.arange(1, 24, dtype="float64"))[:, None]
            for first in range(0, 23, 5):
                yield ids[first : first + 5], ids[first : first + 5]

    assert_rows_once({"x": shuffled(), "steps_per_epoch": 5}, 23)


# ---------------------------------------------------------------------------------------- PyDataset
def _diaries(steps: int | None, **keywords: Any) -> list[list[str]]:
    diaries = []

    def data() -> dict[str, Any]:
        train, validation = Batches(**keywords), Batches(50, **keywords)
        diaries.extend([train.diary, validation.diary])
        return {"x": train, "validation_data": validation}

    fit_both_on_new_data(small_cnn, data, steps_per_epoch=steps, epochs=3)
    return diaries


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.both_generations
def test_py_dataset(float64: None, steps: int | None) -> None:
    train, validation, found_train, found_validation = _diaries(steps)
    assert found_train == train
    assert found_validation == validation


@pytest.mark.thorough
def test_py_dataset_shuffled_by_keras(float64: None) -> None:
    fit_both_on_new_data(small_cnn, lambda: {"x": Batches()}, shuffle=True)


@pytest.mark.thorough
def test_py_dataset_with_class_weight(float64: None) -> None:
    weight = {digit: 1.0 + digit for digit in range(10)}
    fit_both_on_new_data(small_cnn, lambda: {"x": Batches(), "class_weight": weight})


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.both_generations
def test_py_dataset_with_its_own_workers(float64: None, processes: bool) -> None:
    reading = {"workers": 2, "use_multiprocessing": processes, "max_queue_size": 2}
    common = {"epochs": 2, "shuffle": False, "verbose": 0}
    # They affect only the time. (Plain Keras 2 leaves threads behind.)
    expected = small_cnn().fit(Batches(), **common)
    gc.collect()
    gc.freeze()  # Keras forks; children must not collect TensorFlow objects with threads
    try:
        if KERAS_3:
            found = small_cnn().fit(Batches(**reading), **common, num_processes=2)
        else:
            found = small_cnn().fit(Batches(), **common, **reading, num_processes=2)
    finally:
        gc.unfreeze()
    assert_same_history(found.history, expected.history)
    # Keras closes its pools of processes without waiting for their end.
    for pool in list(keras_common.source_module(_ADAPTERS)._DATA_POOLS):
        pool.terminate()
        pool.join()


@pytest.mark.skipif(not KERAS_3, reason="a Sequence of Keras 2 has a length")
@pytest.mark.thorough
def test_py_dataset_without_end(float64: None) -> None:
    class Endless(PyDataset):
        @property
        def num_batches(self) -> None:
            return None

        def __getitem__(self, index: int) -> Any:
            random = np.random.default_rng(index)
            return random.normal(size=(9, 4)), random.integers(0, 3, 9)

    fit_both_on_new_data(linear_classifier, lambda: {"x": Endless()}, steps_per_epoch=4)


@pytest.mark.thorough
def test_rows_of_a_shuffled_py_dataset_once_an_epoch(float64: None) -> None:
    class Ids(PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            ids = np.arange(1 + 5 * index, min(6 + 5 * index, 24), dtype="float64")[:, None]
            return ids, ids

    assert_rows_once({"x": Ids(), "shuffle": True}, 23)
