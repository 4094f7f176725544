"""`sharding="file"`: every worker reads its own files."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, assert_same_state
from test_parity import RowSums

import nanotf
from nanotf.compat.versions import is_keras_3
from nanotf.keras import Sequential
from nanotf.pool.transports import TRANSPORTS

L = tf.keras.layers
WIDTH = 3
BATCH = 8
Table = list[np.ndarray]


def _tables(*rows: int) -> Table:
    """The rows of each file: numbers of which the first is an id, counted from 1."""
    numbers = np.random.default_rng(1).normal(size=(sum(rows), WIDTH))
    numbers[:, 0] = np.arange(1, len(numbers) + 1) / 10
    return np.split(numbers, np.cumsum(rows)[:-1])


def _write_records(folder: pathlib.Path, tables: Table) -> list[str]:
    names = []
    for number, table in enumerate(tables):
        names.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as file:
            for row in table:
                file.write(tf.io.serialize_tensor(tf.constant(row)).numpy())
    return names


def _write_lines(folder: pathlib.Path, tables: Table) -> list[str]:
    names = []
    for number, table in enumerate(tables):
        names.append(str(folder / f"{number}.csv"))
        np.savetxt(names[-1], table, delimiter=",", header="a,b,c", comments="", fmt="%.17g")
    return names


def _parsed(record: Any) -> Any:
    row = tf.ensure_shape(tf.io.parse_tensor(record, "float64"), [WIDTH])
    return row, row[:1] * 10


def _of_line(line: Any) -> Any:
    row = tf.stack(tf.io.decode_csv(line, [tf.constant(0.0, tf.float64)] * WIDTH))
    return row, row[:1] * 10


def _records(names: Sequence[str]) -> tf.data.Dataset:
    files = tf.data.Dataset.from_tensor_slices(list(names))
    return files.interleave(tf.data.TFRecordDataset, cycle_length=2, block_length=4).map(_parsed)


def _lines(names: Sequence[str]) -> tf.data.Dataset:
    files = tf.data.Dataset.from_tensor_slices(list(names))
    without_header = files.interleave(
        lambda name: tf.data.TextLineDataset(name).skip(1), cycle_length=2, block_length=4
    )
    return without_header.map(_of_line)


KINDS: dict[str, tuple[Callable[..., list[str]], Callable[..., tf.data.Dataset]]] = {
    "records": (_write_records, _records),
    "lines": (_write_lines, _lines),
}


def _model(rate: float = 0.1) -> Any:
    tf.keras.utils.set_random_seed(4)
    model = Sequential([L.Input((WIDTH,)), L.Dense(2, activation="tanh"), L.Dense(1)])
    sums = [RowSums(power, name=f"sum{power}") for power in (0, 1, 2)]
    model.compile(tf.keras.optimizers.SGD(rate), "mse", metrics=["mae", *sums])
    return model


def _global_batches(tables: Table, batch_size: int = BATCH) -> tf.data.Dataset:
    """What two workers with a file each make of them: batches of parts, for a single process."""
    share = batch_size // 2
    steps = -(-max(map(len, tables)) // share)

    def generate() -> Any:
        for step in range(steps):
            rows = np.concatenate([t[step * share : (step + 1) * share] for t in tables])
            yield rows, rows[:, :1] * 10

    spec = tf.TensorSpec([None, WIDTH], tf.float64), tf.TensorSpec([None, 1], tf.float64)
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(16, 16), (19, 5), (3, 14), (8, 0)])
def test_batches_are_made_of_the_workers_parts(
    float64: None, tmp_path: pathlib.Path, kind: str, rows: tuple[int, int]
) -> None:
    tables = _tables(*rows)
    write, read = KINDS[kind]
    names = write(tmp_path, tables)
    # A single process may read them in the same order: when all files are equally long.
    expected, found = _model(), _model()
    before = expected.fit(_global_batches(tables), epochs=3, verbose=0)
    after = found.fit(
        read(names).batch(BATCH), epochs=3, verbose=0, num_processes=2, sharding="file"
    )
    assert_same_history(after.history, before.history)
    assert_same_state(found, expected)
    if rows == (16, 16):
        plain = _model().fit(read(names).batch(BATCH), epochs=3, verbose=0)
        assert_same_history(after.history, plain.history)


def _assert_rows_once(dataset: tf.data.Dataset, rows: int, **arguments: Any) -> Any:
    """Asserts that each of the rows 1 to `rows` is used once an epoch: their powers add up."""
    model = _model(rate=0.0)
    history = model.fit(
        dataset, epochs=3, verbose=0, **arguments, num_processes=2, sharding="file"
    ).history
    ids = np.arange(1, rows + 1, dtype="float64")
    for power in range(3):
        np.testing.assert_allclose(history[f"sum{power}"], np.sum(ids**power), rtol=1e-12)
    return history


def _listed(names: list[str]) -> tf.data.Dataset:
    folder = pathlib.Path(names[0]).parent
    files = tf.data.Dataset.list_files(str(folder / "*.tfrecord"))  # in another order each time
    return files.interleave(tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=False)


def _flipped(x: Any, y: Any) -> Any:
    return tf.cond(tf.random.uniform([]) < 0.5, lambda: x, lambda: x[::-1]), y


PIPELINES: dict[str, Callable[[list[str]], tf.data.Dataset]] = {
    "plain_reader": lambda names: tf.data.TFRecordDataset(names).map(_parsed).batch(BATCH),
    "listed": lambda names: _listed(names).map(_parsed).shuffle(50).batch(BATCH),
    "prefetched": lambda names: _records(names).cache().shuffle(9, seed=1).batch(BATCH).prefetch(2),
    "batches_of_three": lambda names: _records(names).batch(3),
    "as_many_as_workers": lambda names: _records(names).batch(2),
    "all_in_one": lambda names: _records(names).batch(100),
    "counted": lambda names: (
        _records(names).batch(BATCH).apply(tf.data.experimental.assert_cardinality(5))
    ),
    "padded": lambda names: (
        _records(names).padded_batch(5, padded_shapes=([None], [1]))
        .map(lambda x, y: (tf.ensure_shape(x, [None, WIDTH]), y))
    ),
    "random": lambda names: _records(names).map(_flipped).batch(BATCH),
    "mapped_batches": lambda names: _records(names).batch(BATCH).map(lambda x, y: (x + 0.0, y)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.thorough
def test_rows_once_an_epoch(float64: None, tmp_path: pathlib.Path, name: str) -> None:
    names = _write_records(tmp_path, _tables(14, 0, 9, 2, 11))
    _assert_rows_once(PIPELINES[name](names), 36)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports_and_validation(float64: None, tmp_path: pathlib.Path, transport: str) -> None:
    names = _write_records(tmp_path, _tables(13, 7, 4))
    data = _records(names).batch(BATCH)
    validation = _records(names).batch(5)
    expected = _model(rate=0.0).evaluate(validation, verbose=0, return_dict=True)
    for several in (validation, _records(names[:1]).concatenate(_records(names[1:])).batch(5)):
        # The second has too few files in one part, and is read in the parent.
        history = _assert_rows_once(data, 24, validation_data=several, transport=transport)
        found = {name: history[f"val_{name}"] for name in expected}
        assert_same_history(found, {name: [value] * 3 for name, value in expected.items()})


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_workers_draw_other_random_numbers(float64: None, tmp_path: pathlib.Path) -> None:
    names = _write_records(tmp_path, _tables(60, 60))
    tf.keras.utils.set_random_seed(8)

    def drawn(x: Any, y: Any) -> Any:
        return x, tf.cast(tf.random.uniform([1]) < 0.5, tf.float64)

    model = _model(rate=0.0)
    data = _records(names).map(drawn).batch(2)
    sums: list[float] = []
    callback = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: sums.append(logs["sum1"])
    )
    model.fit(data, verbose=0, callbacks=[callback], num_processes=2, sharding="file")
    steps = np.diff([0.0, *sums])
    assert set(steps) == {0.0, 1.0, 2.0}, "of the two rows of a step"


@pytest.mark.skipif(not is_keras_3(), reason="Keras 2 does not know where an execution ends")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_several_steps_per_execution(float64: None, tmp_path: pathlib.Path) -> None:
    tables = _tables(19, 5)
    histories = []
    for data, arguments in (
        (_global_batches(tables), {}),
        (
            _records(_write_records(tmp_path, tables)).batch(BATCH),
            {"num_processes": 2, "sharding": "file"},
        ),
    ):
        model = _model()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", steps_per_execution=3)
        histories.append(model.fit(data, epochs=2, verbose=0, **arguments).history)
    assert_same_history(histories[1], histories[0])


def test_batches_of_unequal_rows(float64: None, tmp_path: pathlib.Path) -> None:
    data = _records(_write_records(tmp_path, _tables(16, 16))).batch(BATCH)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        _model().fit(data.map(lambda x, y: (x, y[:3])), verbose=0, num_processes=2, sharding="file")


@pytest.mark.thorough
def test_without_end(float64: None, tmp_path: pathlib.Path) -> None:
    # Each worker goes through its own files again and again: 4 rows of each file a step.
    tables = _tables(8, 12)
    names = _write_records(tmp_path, tables)
    model = _model(rate=0.0)
    history = model.fit(
        _records(names).repeat().batch(BATCH), steps_per_epoch=3, epochs=4, verbose=0,
        num_processes=2, sharding="file",
    ).history  # fmt: skip
    assert history["sum0"] == [24.0] * 4
    np.testing.assert_allclose(sum(history["sum1"]), 6 * np.sum(10 * tables[0][:, 0])
                               + 4 * np.sum(10 * tables[1][:, 0]))  # fmt: skip


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_training_that_stops_early(float64: None, tmp_path: pathlib.Path) -> None:
    names = _write_records(tmp_path, _tables(20, 4))

    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    data = _records(names).batch(BATCH)
    model = _model()
    model.fit(data, verbose=0, callbacks=[Stop()], num_processes=2, sharding="file")
    assert int(model.optimizer.iterations.numpy()) == 2
    _assert_rows_once(data, 24)


REFUSED: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "one_file": (lambda names: _records(names[:1]).batch(BATCH), "1 file for 2 workers"),
    "no_files": (
        lambda names: tf.data.Dataset.from_tensor_slices((np.ones((9, 3)), np.ones((9, 1))))
        .batch(BATCH),
        "unshardable source",
    ),
    "generator": (
        lambda names: ((np.ones((4, 3)), np.ones((4, 1))) for _ in range(3)),
        "only your process can read",
    ),
    "taken": (lambda names: _records(names).take(9).batch(BATCH), r"take\(\)"),
    "zipped": (
        lambda names: tf.data.Dataset.zip((_records(names), _records(names)))
        .map(lambda a, b: a)
        .batch(BATCH),
        r"zip\(\)",
    ),
    "cached_in_a_file": (
        lambda names: _records(names).cache(names[0] + ".cache").batch(BATCH),
        r"cache\(\) in a file",
    ),
    "batches_of_one": (lambda names: _records(names).batch(1), "a batch size of 1"),
    "python": (
        lambda names: _records(names)
        .map(lambda x, y: (tf.ensure_shape(tf.py_function(abs, [x], x.dtype), [WIDTH]), y))
        .batch(BATCH),
        "stateful",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided(tmp_path: pathlib.Path, name: str) -> None:
    make, text = REFUSED[name]
    names = _write_records(tmp_path, _tables(5, 5))
    with pytest.raises(
        nanotf.errors.ShippingError, match=f'(?s)x must be .*"file".*{text}.*sharding="parent"'
    ):
        _model().fit(make(names), verbose=0, num_processes=2, sharding="file")
