"""Datasets of tf.data give the numbers of one process, read in the parent or in the workers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from input_data import (
    BATCH,
    ROWS,
    Batches,
    batches_of_digits,
    fit_both_on_new_data,
    linear_classifier,
    table_of_classes,
)
from parity import assert_same_history, digits, small_cnn

import nanotf


def _pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(digits(ROWS))


def _from_generator() -> tf.data.Dataset:
    signature = (tf.TensorSpec((8, 8, 1), "float64"), tf.TensorSpec((), "int64"))
    return tf.data.Dataset.from_generator(
        lambda: zip(*digits(ROWS), strict=True), output_signature=signature
    )


def _scaled(x: Any, y: Any) -> Any:
    scaled = tf.py_function(lambda v: v * 2, [x], x.dtype)
    scaled.set_shape(x.shape)
    return scaled, y


DATASETS: dict[str, tuple[Callable[[], tf.data.Dataset], dict[str, Any]]] = {
    "cached_and_mapped": (
        lambda: _pairs().cache().map(lambda x, y: (1 - x, y), tf.data.AUTOTUNE).batch(BATCH),
        {},
    ),
    "shuffled_and_repeated": (
        lambda: _pairs().shuffle(ROWS, seed=3).repeat().batch(BATCH),
        {"steps_per_epoch": 3},
    ),
    "from_generator": (lambda: _from_generator().batch(BATCH).prefetch(2), {}),
    "py_function": (lambda: _pairs().map(_scaled).batch(BATCH), {}),
    "class_weight": (
        lambda: _pairs().batch(BATCH),
        {"class_weight": {digit: 1.0 + digit for digit in range(10)}},
    ),
    "batches_of_one": (lambda: _pairs().take(5).batch(1), {}),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.both_generations
def test_datasets(float64: None, name: str) -> None:
    make, arguments = DATASETS[name]
    fit_both_on_new_data(small_cnn, lambda: {"x": make()}, **arguments)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_dataset_of_records(float64: None, tmp_path: pathlib.Path) -> None:
    x, y = table_of_classes()
    for number in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord")) as file:
            for row, label in zip(x[number::2], y[number::2], strict=True):
                file.write(tf.io.serialize_tensor(tf.constant([*row, label])).numpy())

    def parse(record: Any) -> Any:
        numbers = tf.ensure_shape(tf.io.parse_tensor(record, "float64"), [5])
        return numbers[:4], tf.cast(numbers[4], tf.int64)

    def make() -> tf.data.Dataset:
        files = tf.data.Dataset.list_files(str(tmp_path / "*.tfrecord"), shuffle=False)
        return files.interleave(tf.data.TFRecordDataset).map(parse).batch(16)

    fit_both_on_new_data(linear_classifier, lambda: {"x": make(), "validation_data": make()})


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_dataset_of_lines(float64: None, tmp_path: pathlib.Path) -> None:
    x, y = table_of_classes()
    path = tmp_path / "table.csv"
    np.savetxt(path, np.column_stack([x, y]), delimiter=",")

    def parse(line: Any) -> Any:
        *numbers, label = tf.io.decode_csv(line, [tf.constant(0.0, tf.float64)] * 5)
        return tf.stack(numbers), label

    fit_both_on_new_data(
        linear_classifier, lambda: {"x": tf.data.TextLineDataset(str(path)).map(parse).batch(16)}
    )


# ----------------------------------------------------------------------------------------- sharding
PIPELINES: dict[str, tuple[Callable[[], tf.data.Dataset], dict[str, Any]]] = {
    "mapped": (lambda: _pairs().map(lambda x, y: (1 - x, y)).batch(BATCH), {}),
    "shuffled": (lambda: _pairs().shuffle(ROWS, seed=3).batch(BATCH), {"epochs": 3}),
    "endless": (lambda: _pairs().repeat().batch(BATCH), {"steps_per_epoch": 3}),
    "class_weight": DATASETS["class_weight"],
    "fewer_rows_than_workers": (lambda: _pairs().take(3).batch(1), {}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_that_workers_run(float64: None, name: str) -> None:
    make, arguments = PIPELINES[name]
    expected = small_cnn().fit(make(), verbose=0, **arguments)
    found = small_cnn().fit(
        make(), validation_data=make().take(3), verbose=0, **arguments,
        num_processes=2, sharding="data",
    )  # fmt: skip
    history = {k: v for k, v in found.history.items() if not k.startswith("val_")}
    assert_same_history(history, expected.history)
    assert np.isfinite(found.history["val_loss"]).all()


def _unseeded() -> tf.data.Dataset:
    # A dataset takes its seed from the global one on creation.
    tf.random.set_seed(None)
    return _pairs().shuffle(ROWS).batch(BATCH)


NOT_FOR_WORKERS: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (batches_of_digits, "only your process can read"),
    "py_dataset": (Batches, "only your process can read"),
    "from_generator": (lambda: _from_generator().batch(BATCH), "stateful"),
    "py_function": (lambda: _pairs().map(_scaled).batch(BATCH), "stateful"),
    "random": (
        lambda: _pairs().map(lambda x, y: (x + tf.random.uniform([], dtype=x.dtype), y)).batch(9),
        "stateful",
    ),
    "shuffled_without_seed": (_unseeded, r"shuffle\(\) without a seed"),
    "in_any_order": (
        lambda: _pairs().map(lambda x, y: (x, y), 2, deterministic=False).batch(BATCH),
        "deterministic=False",
    ),
}


@pytest.mark.parametrize("name", NOT_FOR_WORKERS)
def test_pipelines_that_workers_cannot_run(name: str) -> None:
    make, text = NOT_FOR_WORKERS[name]
    with pytest.raises(nanotf.errors.ShippingError, match=f'(?s){text}.*sharding="parent"'):
        small_cnn().fit(make(), verbose=0, num_processes=2, sharding="data")
