"""Arrays, tensors, data frames and strings give the numbers of one process."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from input_data import KERAS_3, L, assert_rows_once, linear_classifier, table_of_classes
from parity import fit_both

from nanotf.keras import Sequential

pd = pytest.importorskip("pandas")

TABLES = {
    "tensors": lambda x, y: (tf.constant(x), tf.constant(y)),
    "data_frame": lambda x, y: (pd.DataFrame(x, columns=list("abcd")), pd.Series(y)),
    "float32_and_lists_of_rows": lambda x, y: (x.astype("float32"), y.astype("int8")),
    "booleans": lambda x, y: (x > 0.2, y),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.both_generations
def test_kinds_of_arrays(float64: None, name: str) -> None:
    x, y = TABLES[name](*table_of_classes())
    fit_both(linear_classifier, x=x, y=y, batch_size=20, validation_split=0.3)


@pytest.mark.both_generations
@pytest.mark.skipif(KERAS_3, reason="Keras 3 does not take lists of numbers")
def test_lists_of_numbers(float64: None) -> None:
    x, y = table_of_classes(30)
    fit_both(linear_classifier, x=x.tolist(), y=y.tolist(), batch_size=8)


@pytest.mark.thorough
def test_validation_data_as_data_frame(float64: None) -> None:
    x, y = table_of_classes()
    frame = pd.DataFrame(x, columns=list("abcd"))
    fit_both(linear_classifier, x=x, y=y, batch_size=32, validation_data=(frame, pd.Series(y)))


@pytest.mark.both_generations
def test_class_weight_of_arrays(float64: None) -> None:
    x, y = table_of_classes()
    fit_both(linear_classifier, x=x, y=y, batch_size=32, class_weight={0: 1.0, 1: 0.25, 2: 3.0})


@pytest.mark.thorough
def test_class_weight_of_one_hot_targets(float64: None) -> None:
    def categorical() -> Any:
        tf.keras.utils.set_random_seed(2)
        model = Sequential([L.Input((4,)), L.Dense(3)])
        loss = tf.keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.1), loss)
        return model

    x, y = table_of_classes()
    fit_both(categorical, x=x, y=np.eye(3)[y], class_weight={0: 1.0, 1: 0.25, 2: 3.0})


# Five batches: numbers of steps that divide five, that do not, that equal it, and that exceed it.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
@pytest.mark.parametrize("batch_size", [15, None])
@pytest.mark.both_generations
def test_steps_per_epoch_of_arrays(float64: None, steps: int, batch_size: int | None) -> None:
    x, y = table_of_classes()
    fit_both(linear_classifier, x=x, y=y, batch_size=batch_size, steps_per_epoch=steps, epochs=4)


# Executions of several steps go beyond the end of an epoch (Keras 3), or are cut (Keras 2).
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_per_epoch_not_divisible_by_executions(float64: None) -> None:
    def several() -> Any:
        model = linear_classifier()
        model.compile("sgd", model.loss, metrics=["accuracy"], steps_per_execution=2)
        return model

    x, y = table_of_classes(80)
    fit_both(
        several, x=x, y=y, batch_size=8, steps_per_epoch=5, epochs=3,
        validation_data=table_of_classes(24), validation_batch_size=8, validation_steps=3,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_more_validation_steps_than_data(float64: None) -> None:
    x, y = table_of_classes()
    fit_both(linear_classifier, x=x, y=y, validation_data=(x, y), validation_steps=9, epochs=1)


def _warnings_of(caplog: pytest.LogCaptureFixture, **arguments: Any) -> int:
    """Counts Keras's reports that the data ran out: a warning, or a line in TensorFlow's log."""
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear_classifier().fit(**arguments, verbose=0)
    text = caplog.text + "".join(str(w.message) for w in caught)
    return text.count("Your input ran out of data")


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
@pytest.mark.both_generations
def test_reports_that_data_ran_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = table_of_classes()
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
    assert_rows_once({"x": ids, "y": ids, "batch_size": batch_size, "shuffle": shuffle}, 7)


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
