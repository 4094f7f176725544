"""Every kind of data that Keras's `fit` accepts gives the numbers of one process."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import pathlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, digits, fit_both, small_cnn, weights
from test_parity import RowSums

import nanotf
from nanotf.compat import keras_common
from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError
from nanotf.keras import Sequential

pd = pytest.importorskip("pandas")

L = tf.keras.layers
KERAS_3 = is_keras_3()
PyDataset: Any = tf.keras.utils.PyDataset if KERAS_3 else tf.keras.utils.Sequence
ROWS, BATCH = 130, 40

# Keras makes a single queue for all processes that it starts, and keeps it.
_ADAPTERS = "trainers.data_adapters.py_dataset_adapter" if KERAS_3 else "utils.data_utils"
keras_common.source_module(_ADAPTERS).get_worker_id_queue()


def _table(rows: int = 70) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 4)), random.integers(0, 3, rows)


def _linear() -> Any:
    tf.keras.utils.set_random_seed(2)
    model = Sequential([L.Input((4,)), L.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def _both(make: Callable[[], Any], data: Callable[[], dict[str, Any]], **arguments: Any) -> None:
    """Works like `parity.fit_both`, for data that can be used once."""
    arguments = {"verbose": 0, "epochs": 2, **arguments}
    before = make().fit(**data(), **arguments)  # `make` sets the seed
    after = make().fit(**data(), **arguments, num_processes=2)
    assert after.epoch == before.epoch
    assert_same_history(after.history, before.history)


# ------------------------------------------------------------------------------ arrays
TABLES = {
    "tensors": lambda x, y: (tf.constant(x), tf.constant(y)),
    "data_frame": lambda x, y: (pd.DataFrame(x, columns=list("abcd")), pd.Series(y)),
    "float32_and_lists_of_rows": lambda x, y: (x.astype("float32"), y.astype("int8")),
    "booleans": lambda x, y: (x > 0.2, y),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.both_generations
def test_kinds_of_arrays(float64: None, name: str) -> None:
    x, y = TABLES[name](*_table())
    fit_both(_linear, x=x, y=y, batch_size=20, validation_split=0.3)


@pytest.mark.both_generations
@pytest.mark.skipif(KERAS_3, reason="Keras 3 does not take lists of numbers")
def test_lists_of_numbers(float64: None) -> None:
    x, y = _table(30)
    fit_both(_linear, x=x.tolist(), y=y.tolist(), batch_size=8)


@pytest.mark.thorough
def test_validation_data_as_data_frame(float64: None) -> None:
    x, y = _table()
    frame = pd.DataFrame(x, columns=list("abcd"))
    fit_both(_linear, x=x, y=y, batch_size=32, validation_data=(frame, pd.Series(y)))


@pytest.mark.both_generations
def test_class_weight_of_arrays(float64: None) -> None:
    x, y = _table()
    fit_both(_linear, x=x, y=y, batch_size=32, class_weight={0: 1.0, 1: 0.25, 2: 3.0})


@pytest.mark.thorough
def test_class_weight_of_one_hot_targets(float64: None) -> None:
    def categorical() -> Any:
        tf.keras.utils.set_random_seed(2)
        model = Sequential([L.Input((4,)), L.Dense(3)])
        loss = tf.keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.1), loss)
        return model

    x, y = _table()
    fit_both(categorical, x=x, y=np.eye(3)[y], class_weight={0: 1.0, 1: 0.25, 2: 3.0})


# Five batches: numbers of steps that divide five, that do not, that equal it, and that exceed it.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
@pytest.mark.parametrize("batch_size", [15, None])
@pytest.mark.both_generations
def test_steps_per_epoch_of_arrays(float64: None, steps: int, batch_size: int | None) -> None:
    x, y = _table()
    fit_both(_linear, x=x, y=y, batch_size=batch_size, steps_per_epoch=steps, epochs=4)


# Executions of several steps go beyond the end of an epoch (Keras 3), or are cut (Keras 2).
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_per_epoch_not_divisible_by_executions(float64: None) -> None:
    def several() -> Any:
        model = _linear()
        model.compile("sgd", model.loss, metrics=["accuracy"], steps_per_execution=2)
        return model

    x, y = _table(80)
    fit_both(
        several, x=x, y=y, batch_size=8, steps_per_epoch=5, epochs=3,
        validation_data=_table(24), validation_batch_size=8, validation_steps=3,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_more_validation_steps_than_data(float64: None) -> None:
    x, y = _table()
    fit_both(_linear, x=x, y=y, validation_data=(x, y), validation_steps=9, epochs=1)


def _warnings_of(caplog: pytest.LogCaptureFixture, **arguments: Any) -> int:
    """Counts Keras's reports that the data ran out: a warning, or a line in TensorFlow's log."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _linear().fit(**arguments, verbose=0)
    text = caplog.text + "".join(str(w.message) for w in caught)
    return text.count("Your input ran out of data")


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
@pytest.mark.both_generations
def test_reports_that_data_ran_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = _table()
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": 15, "shuffle": False}
    if kind == "dataset":
        data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(15)}
    data |= {"steps_per_epoch": 3, "epochs": 4}
    if not KERAS_3 and kind == "arrays":
        data["steps_per_epoch"] = 7  # the passes of all epochs have fewer batches
    expected = _warnings_of(caplog, **data)
    assert expected > 0
    assert _warnings_of(caplog, **data, num_processes=2) == expected


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_rows_once_an_epoch(float64: None, shuffle: Any, batch_size: int) -> None:
    ids = np.arange(1, 8, dtype="float64")[:, None]
    _assert_rows_once({"x": ids, "y": ids, "batch_size": batch_size, "shuffle": shuffle}, 7)


def _assert_rows_once(data: dict[str, Any], rows: int, epochs: int = 3) -> None:
    """Asserts that each of the rows 1 to `rows` is used once an epoch: their powers add up."""
    tf.keras.utils.set_random_seed(1)
    model = Sequential([L.Input((1,)), L.Dense(1)])
    sums = [RowSums(power, name=f"sum{power}") for power in (0, 1, 2, 3)]
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=sums)
    history = model.fit(**data, epochs=epochs, verbose=0, num_processes=2).history
    ids = np.arange(1, rows + 1, dtype="float64")
    for power in range(4):
        np.testing.assert_allclose(history[f"sum{power}"], np.sum(ids**power), rtol=1e-12)


def _words(source: str) -> tuple[Any, dict[str, Any]]:
    """Returns a model that looks words up, and its data as strings."""
    tf.keras.utils.set_random_seed(4)
    words = np.array(["up", "down", "left", "right", "unheard of"])
    text = np.random.default_rng(0).choice(words, (50, 3))
    y = (text == "up").sum(axis=1).astype("float64")[:, None]
    model = Sequential(
        [
            L.Input((3,), dtype="string"),
            L.StringLookup(vocabulary=words[:4].tolist()),
            L.Embedding(6, 4),
            L.Flatten(),
            L.Dense(1),
        ]
    )
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    tensor = tf.constant(text)
    if source == "dataset":
        return model, {"x": tf.data.Dataset.from_tensor_slices((tensor, y)).batch(16)}
    return model, {"x": tensor, "y": y, "batch_size": 16, "shuffle": False}


@pytest.mark.parametrize("source", ["tensor", "dataset"])
@pytest.mark.both_generations
def test_strings(float64: None, source: str) -> None:
    fit_both(lambda: _words(source)[0], **_words(source)[1])


# -------------------------------------------------------------------------- generators
def _batches(form: str = "x, y", passes: int = 1) -> Iterator[Any]:
    x, y = digits(ROWS)
    w = weights(ROWS)
    for _ in range(passes):
        for first in range(0, ROWS, BATCH):
            part = slice(first, first + BATCH)
            if form == "x, y":
                yield x[part], y[part]
            else:
                yield x[part], y[part], w[part]


@pytest.mark.parametrize("form", ["x, y", "x, y, w"])
@pytest.mark.both_generations
def test_generator(float64: None, form: str) -> None:
    _both(
        lambda: small_cnn(weighted=form == "x, y, w"),
        lambda: {"x": _batches(form, 3), "steps_per_epoch": 4},
    )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_generator_without_steps(float64: None) -> None:
    # Keras 3 continues with the two batches that it peeked at, Keras 2 with none.
    _both(small_cnn, lambda: {"x": _batches()})


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.both_generations
def test_generator_as_validation_data(float64: None) -> None:
    x, y = digits(80)
    # If batches differ, Keras's batches depend on how far TensorFlow reads ahead.
    _both(
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

    _both(model, lambda: {"x": batches(), "steps_per_epoch": 5})


def test_generator_is_read_in_the_parent_and_not_far_ahead() -> None:
    read: list[int] = []

    def endless() -> Iterator[Any]:
        x, y = _table(16)
        for number in itertools.count():
            read.append(os.getpid())
            yield x + number, y

    generator = endless()
    _linear().fit(generator, steps_per_epoch=5, epochs=2, verbose=0, num_processes=2)
    assert set(read) == {os.getpid()}
    assert len(read) == 10, "no batch beyond those that the epochs need"
    _linear().fit(generator, steps_per_epoch=5, verbose=0, num_processes=2)
    assert 15 <= len(read) <= 17, "Keras peeks at two batches"


class _Stop(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 2


@pytest.mark.thorough
def test_training_that_stops_early_does_not_read_the_generator_further() -> None:
    read: list[int] = []

    def endless() -> Iterator[Any]:
        x, y = _table(16)
        for number in itertools.count():
            read.append(number)
            yield x, y

    _linear().fit(
        endless(),
        steps_per_epoch=1000,
        epochs=2,
        verbose=0,
        callbacks=[_Stop()],
        num_processes=2,
    )
    # Three steps, three slots, and each worker's prefetched batches.
    assert 3 <= len(read) <= 12


class Broken(Exception):
    """An exception unknown to TensorFlow."""


def _breaking(batches: int) -> Iterator[Any]:
    yield from itertools.islice(itertools.cycle(_batches()), batches)
    raise Broken("in the middle")


class _BreakingDataset(PyDataset):
    """Five batches; one batch, or the end of the first epoch, raises."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.bad = bad

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise Broken("in the middle")
        return digits(BATCH)

    def on_epoch_end(self) -> None:
        if self.bad is None:
            raise Broken("in the middle")


def _breaking_pipeline(batches: int) -> tf.data.Dataset:
    x, y = digits(BATCH)
    signature = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    return tf.data.Dataset.from_generator(lambda: _breaking(batches), output_signature=signature)


BREAKING: dict[str, Callable[[Any], Any]] = {
    "second_epoch": lambda fit: fit(_breaking(7), steps_per_epoch=5),
    "py_dataset": lambda fit: fit(_BreakingDataset(3), validation_data=digits(10)),
    "end_of_epoch": lambda fit: fit(_BreakingDataset(), validation_data=digits(10)),
    "pipeline": lambda fit: fit(_breaking_pipeline(3)),
    "first_batch": lambda fit: fit(_breaking_pipeline(0)),
    "validation": lambda fit: fit(
        *digits(ROWS), validation_data=_breaking(3), validation_steps=4, batch_size=BATCH
    ),
    "validation_at_once": lambda fit: fit(*digits(ROWS), validation_data=_breaking_pipeline(0)),
}


def _raises_broken(call: Callable[[], Any]) -> None:
    # An exception in a pipeline's Python function becomes TensorFlow's error, in one process as
    # well.
    with pytest.raises((Broken, tf.errors.UnknownError), match="in the middle") as caught:
        call()
    if isinstance(caught.value, Broken):
        frames = traceback.format_tb(caught.value.__traceback__)
        assert any(name in frames[-1] for name in ("_breaking", "__getitem__", "on_epoch_end"))


@pytest.mark.parametrize("name", BREAKING)
@pytest.mark.both_generations
def test_data_that_raise_leave_the_workers_for_the_next_call(name: str) -> None:
    small_cnn().fit(*digits(ROWS), verbose=0, num_processes=2)
    pids = nanotf.worker_pids()
    model = small_cnn()
    weights = [model.get_weights()]
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: weights.append(model.get_weights())
    )
    _raises_broken(
        lambda: BREAKING[name](
            functools.partial(model.fit, epochs=3, verbose=0, callbacks=[callback], num_processes=2)
        )
    )
    # Keras 2 ends the epoch of a `Sequence` after the callbacks' hooks.
    later = name == "second_epoch" or (name == "end_of_epoch" and not KERAS_3)
    assert len(weights) == (2 if later else 1)
    for found, expected in zip(model.get_weights(), weights[-1], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert nanotf.worker_pids() == pids
    fit_both(small_cnn, x=digits(ROWS)[0], y=digits(ROWS)[1], validation_data=digits(50))
    assert nanotf.worker_pids() == pids


@pytest.mark.thorough
def test_callbacks_get_the_batches_before_data_raised() -> None:
    heard = []

    class Hears(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            heard.append(("batch", batch))

        def on_test_begin(self, logs: Any = None) -> None:
            heard.append(("test", 0))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            heard.append(("epoch", epoch))

    for processes in (None, 2):
        _raises_broken(
            lambda n=processes: small_cnn().fit(  # type: ignore[misc]
                _breaking(8),
                steps_per_epoch=5,
                epochs=3,
                verbose=0,
                callbacks=[Hears()],
                validation_data=digits(10),
                num_processes=n,
            )
        )
    middle = len(heard) // 2
    assert heard[:middle] == heard[middle:]
    assert heard[-1] == ("batch", 2)


def test_evaluate_and_predict_of_data_that_raise() -> None:
    model = small_cnn()
    expected = model.evaluate(*digits(ROWS), verbose=0, num_processes=2)
    pids = nanotf.worker_pids()
    for method in (model.evaluate, model.predict):
        calls = [
            lambda m=method: m(_breaking(3), steps=5, verbose=0, num_processes=2),
            lambda m=method: m(_breaking_pipeline(2), verbose=0, num_processes=2),
            lambda m=method: m(_breaking_pipeline(0), verbose=0, num_processes=2),
        ]
        for call in calls:
            _raises_broken(call)
    assert model.evaluate(*digits(ROWS), verbose=0, num_processes=2) == pytest.approx(expected)
    assert nanotf.worker_pids() == pids


def _pairs_of(x_rows: int, y_rows: int) -> tf.data.Dataset:
    """Returns batches of a table and of its labels, zipped: the last ones are short."""
    x, y = (tf.data.Dataset.from_tensor_slices(part) for part in _table(40))
    return tf.data.Dataset.zip((x.batch(x_rows), y.batch(y_rows)))


class _UnequalBatches(PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        x, y = _table(16)
        return x, y[: 9 if index == 2 else 16]


def _unequal(weights: int = 16) -> Iterator[Any]:
    """Yields good batches, then a batch whose labels or weights differ in rows from the inputs."""
    x, y = _table(16)
    for _ in range(2):
        yield x, y, np.ones(16)
    yield x, y[: 9 if weights == 16 else 16], np.ones(weights)


UNEQUAL: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "generator": lambda model, two: model.fit(_unequal(), steps_per_epoch=3, verbose=0, **two),
    "sample_weight": lambda model, two: model.fit(
        _unequal(weights=9), steps_per_epoch=3, verbose=0, **two
    ),
    "py_dataset": lambda model, two: model.fit(_UnequalBatches(), verbose=0, shuffle=False, **two),
    "pipeline": lambda model, two: model.fit(
        _pairs_of(16, 16).concatenate(_pairs_of(16, 9)), verbose=0, **two
    ),
    "pipeline_in_workers": lambda model, two: model.fit(
        _pairs_of(16, 16).concatenate(_pairs_of(16, 9)),
        verbose=0,
        **(two and {**two, "sharding": "data"}),
    ),
    "validation": lambda model, two: model.fit(
        *_table(), validation_data=_pairs_of(16, 9), verbose=0, **two
    ),
    "evaluate": lambda model, two: model.evaluate(_pairs_of(16, 9), verbose=0, **two),
}


def _weights_of_columns(model: Any, **two: int) -> None:
    """Fits with weights of three columns, which would broadcast over shares of three rows."""
    model.fit(*_table(60), sample_weight=np.ones((60, 3)), batch_size=6, verbose=0, **two)


# Either the forward or the backward operation fails first, at random.
SHAPES_DIFFER = r"ncompatible shapes|must be equal|must have|squeeze"


@pytest.mark.thorough
@pytest.mark.both_generations
def test_batches_of_unequal_rows_are_rejected() -> None:
    model = _linear()
    model.fit(*_table(), verbose=0, num_processes=2)
    pids = nanotf.worker_pids()
    for name, call in UNEQUAL.items():
        with pytest.raises(InvalidArgumentError, match="same number of rows"):
            call(model, {"num_processes": 2})
        assert nanotf.worker_pids() == pids, name
    with pytest.raises((ValueError, tf.errors.OpError)) as of_keras:
        _weights_of_columns(model)
    with pytest.raises(type(of_keras.value), match=SHAPES_DIFFER):
        _weights_of_columns(model, num_processes=2)
    assert nanotf.worker_pids() == pids
    fit_both(_linear, x=_table()[0], y=_table()[1])
    assert nanotf.worker_pids() == pids


def test_a_step_that_raises_while_more_batches_follow() -> None:
    """Workers report the error even if one of their threads waits for a generator's next batch."""
    x, y = _table(16)
    batches = itertools.chain([(x, y)], itertools.repeat((x, y + 99)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value"):
        _linear().fit((b for b in batches), steps_per_epoch=50, verbose=0, num_processes=2)


@pytest.mark.both_generations
def test_unequal_rows_that_keras_takes(float64: None) -> None:
    """Unused targets pass through unchanged; rows that cannot be divided are an error."""
    model = _linear()
    expected = model.predict(_pairs_of(16, 9), verbose=0)
    found = model.predict(_pairs_of(16, 9), verbose=0, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)

    x, y = _table(16)
    one_weight = tf.data.Dataset.from_tensors((x, y, np.ones(1)))
    model.fit(one_weight, verbose=0)
    with pytest.raises(ValueError, match=r"same number of rows.*\(16,\), \(1,\)\].*leave num_pro"):
        model.fit(one_weight, verbose=0, num_processes=2)


@pytest.mark.thorough
def test_rows_of_a_generator_once_an_epoch(float64: None) -> None:
    def shuffled() -> Iterator[Any]:
        random = np.random.default_rng(0)
        for _ in range(3):
            ids = random.permutation(np.arange(1, 24, dtype="float64"))[:, None]
            for first in range(0, 23, 5):
                yield ids[first : first + 5], ids[first : first + 5]

    _assert_rows_once({"x": shuffled(), "steps_per_epoch": 5}, 23)


# --------------------------------------------------------------------------- PyDataset
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


def _diaries(steps: int | None, **keywords: Any) -> list[list[str]]:
    diaries = []

    def data() -> dict[str, Any]:
        train, validation = Batches(**keywords), Batches(50, **keywords)
        diaries.extend([train.diary, validation.diary])
        return {"x": train, "validation_data": validation}

    _both(small_cnn, data, steps_per_epoch=steps, epochs=3)
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
    _both(small_cnn, lambda: {"x": Batches()}, shuffle=True)


@pytest.mark.thorough
def test_py_dataset_with_class_weight(float64: None) -> None:
    weight = {digit: 1.0 + digit for digit in range(10)}
    _both(small_cnn, lambda: {"x": Batches(), "class_weight": weight})


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

    _both(_linear, lambda: {"x": Endless()}, steps_per_epoch=4)


@pytest.mark.thorough
def test_rows_of_a_shuffled_py_dataset_once_an_epoch(float64: None) -> None:
    class Ids(PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            ids = np.arange(1 + 5 * index, min(6 + 5 * index, 24), dtype="float64")[:, None]
            return ids, ids

    _assert_rows_once({"x": Ids(), "shuffle": True}, 23)


@pytest.mark.thorough
def test_py_dataset_that_raises() -> None:
    class Breaking(Batches):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise Broken("at the third")
            return super().__getitem__(index)

    with pytest.raises(Broken, match="at the third"):
        small_cnn().fit(Breaking(), shuffle=False, verbose=0, num_processes=2)
    small_cnn().fit(Batches(), verbose=0, num_processes=2)


# ----------------------------------------------------------------------------- datasets
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
    _both(small_cnn, lambda: {"x": make()}, **arguments)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_dataset_of_records(float64: None, tmp_path: pathlib.Path) -> None:
    x, y = _table()
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

    _both(_linear, lambda: {"x": make(), "validation_data": make()})


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.thorough
def test_dataset_of_lines(float64: None, tmp_path: pathlib.Path) -> None:
    x, y = _table()
    path = tmp_path / "table.csv"
    np.savetxt(path, np.column_stack([x, y]), delimiter=",")

    def parse(line: Any) -> Any:
        *numbers, label = tf.io.decode_csv(line, [tf.constant(0.0, tf.float64)] * 5)
        return tf.stack(numbers), label

    _both(_linear, lambda: {"x": tf.data.TextLineDataset(str(path)).map(parse).batch(16)})


# ------------------------------------------------------------------------------ sharding
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
    "generator": (_batches, "only your process can read"),
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
