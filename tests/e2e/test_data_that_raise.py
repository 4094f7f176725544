"""Data that raise or have unequal rows are an error, and the workers serve the next call."""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from input_data import (
    BATCH,
    KERAS_3,
    ROWS,
    Batches,
    PyDataset,
    batches_of_digits,
    linear_classifier,
    table_of_classes,
)
from parity import digits, fit_both, small_cnn

import nanotf
from nanotf.errors import InvalidArgumentError


class Broken(Exception):
    """An exception unknown to TensorFlow."""


def _breaking(batches: int) -> Iterator[Any]:
    yield from itertools.islice(itertools.cycle(batches_of_digits()), batches)
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


def test_a_step_that_raises_while_more_batches_follow() -> None:
    """Workers report the error even if one of their threads waits for a generator's next batch."""
    x, y = table_of_classes(16)
    batches = itertools.chain([(x, y)], itertools.repeat((x, y + 99)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value"):
        linear_classifier().fit(
            (b for b in batches), steps_per_epoch=50, verbose=0, num_processes=2
        )


# ------------------------------------------------------------------------------------- unequal rows
def _pairs_of(x_rows: int, y_rows: int) -> tf.data.Dataset:
    """Returns batches of a table and of its labels, zipped: the last ones are short."""
    x, y = (tf.data.Dataset.from_tensor_slices(part) for part in table_of_classes(40))
    return tf.data.Dataset.zip((x.batch(x_rows), y.batch(y_rows)))


class _UnequalBatches(PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        x, y = table_of_classes(16)
        return x, y[: 9 if index == 2 else 16]


def _unequal(weights: int = 16) -> Iterator[Any]:
    """Yields good batches, then a batch whose labels or weights differ in rows from the inputs."""
    x, y = table_of_classes(16)
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
        *table_of_classes(), validation_data=_pairs_of(16, 9), verbose=0, **two
    ),
    "evaluate": lambda model, two: model.evaluate(_pairs_of(16, 9), verbose=0, **two),
}


def _weights_of_columns(model: Any, **two: int) -> None:
    """Fits with weights of three columns, which would broadcast over shares of three rows."""
    model.fit(*table_of_classes(60), sample_weight=np.ones((60, 3)), batch_size=6, verbose=0, **two)


# Either the forward or the backward operation fails first, at random.
SHAPES_DIFFER = r"ncompatible shapes|must be equal|must have|squeeze"


@pytest.mark.thorough
@pytest.mark.both_generations
def test_batches_of_unequal_rows_are_rejected() -> None:
    model = linear_classifier()
    model.fit(*table_of_classes(), verbose=0, num_processes=2)
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
    fit_both(linear_classifier, x=table_of_classes()[0], y=table_of_classes()[1])
    assert nanotf.worker_pids() == pids


@pytest.mark.both_generations
def test_unequal_rows_that_keras_takes(float64: None) -> None:
    """Unused targets pass through unchanged; rows that cannot be divided are an error."""
    model = linear_classifier()
    expected = model.predict(_pairs_of(16, 9), verbose=0)
    found = model.predict(_pairs_of(16, 9), verbose=0, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)

    x, y = table_of_classes(16)
    one_weight = tf.data.Dataset.from_tensors((x, y, np.ones(1)))
    model.fit(one_weight, verbose=0)
    with pytest.raises(ValueError, match=r"same number of rows.*\(16,\), \(1,\)\].*leave num_pro"):
        model.fit(one_weight, verbose=0, num_processes=2)
