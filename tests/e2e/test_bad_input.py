"""Bad input: a clear exception, and no process started for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import digits, small_cnn

import nanotf
from nanotf import errors
from nanotf.keras import Sequential

L = tf.keras.layers


@pytest.fixture(autouse=True)
def _no_process_is_started() -> Iterator[None]:
    nanotf.shutdown()
    yield
    assert nanotf.worker_pids() == ()


def _fit(model: Any = None, **arguments: Any) -> None:
    x, y = digits(20)
    model = small_cnn() if model is None else model
    model.fit(**{"x": x, "y": y, "verbose": 0, "num_processes": 2, **arguments})


NUMBERS = [
    (0, ValueError, "num_processes=0"),
    (-1, ValueError, "num_processes=-1"),
    (True, TypeError, "num_processes=True"),
    (2.0, TypeError, r"num_processes=2\.0"),
    ("four", (TypeError, ValueError), "num_processes='four'"),
    (10**6, errors.PlacementError, "1000000"),
]


@pytest.mark.parametrize(("number", "kind", "text"), NUMBERS)
def test_num_processes(number: Any, kind: Any, text: str) -> None:
    with pytest.raises(errors.NanoError, match=text) as caught:
        _fit(num_processes=number)
    assert isinstance(caught.value, kind)


def test_too_many_processes_says_how_many_cores_there_are() -> None:
    with pytest.raises(errors.PlacementError, match=r"\b\d+ can be used"):
        _fit(num_processes=10**6)


def test_cores_per_process_too_large() -> None:
    with pytest.raises(errors.PlacementError, match=r"cores_per_process"):
        _fit(cores_per_process=10**6)


@pytest.mark.parametrize("cores", [0, -2])
def test_cores_per_process_too_small(cores: int) -> None:
    with pytest.raises(ValueError, match=f"cores_per_process={cores}"):
        _fit(cores_per_process=cores)


@pytest.mark.parametrize("processes", [None, 1, 2])
def test_unknown_transport(processes: int | None) -> None:
    from nanotf.transports import TRANSPORTS

    with pytest.raises(errors.InvalidArgumentError, match="transport='carrier pigeon'") as caught:
        _fit(transport="carrier pigeon", num_processes=processes)
    for transport in TRANSPORTS:
        assert repr(transport) in str(caught.value)


def test_model_that_is_not_compiled() -> None:
    with pytest.raises(errors.ModelError, match=r"You must call `compile\(\)` before"):
        _fit(Sequential([L.Input((8, 8, 1)), L.Flatten(), L.Dense(10)]))


def test_unknown_fit_argument() -> None:
    with pytest.raises(TypeError, match="batchsize"):
        _fit(batchsize=3)


class RankDependent(tf.keras.layers.Layer):
    def build(self, shape: Any) -> None:
        raise ValueError("no kernel for this shape")


def test_unbuilt_model_whose_shapes_do_not_fit() -> None:
    model = Sequential([L.Flatten(), RankDependent()])
    model.compile("sgd", "mse")
    with pytest.raises(errors.ModelError, match=r"(?s)must be built before workers.*no kernel"):
        _fit(model)


class Width:
    """Not a plain value: Keras cannot put it into a configuration by itself."""

    def __init__(self, width: int) -> None:
        self.width = width


class Wide(tf.keras.Model):
    """Derived from plain Keras, with a required argument and no get_config."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.flatten = L.Flatten()
        self.dense = L.Dense(width.width)

    def call(self, inputs: Any) -> Any:
        return self.dense(self.flatten(inputs))


def test_subclassed_model_that_cannot_be_rebuilt() -> None:
    model = nanotf.accelerate(Wide(Width(10)))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(errors.ModelError, match=r"(?s)class Wide .*get_config\(\)"):
        _fit(model)


class WrongConfig(Wide):
    def get_config(self) -> dict[str, Any]:
        return {"width": Width(3)}


def test_model_whose_config_makes_another() -> None:
    model = nanotf.accelerate(WrongConfig(Width(10)))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(errors.ModelError, match=r"class WrongConfig .*variables of shapes"):
        _fit(model)


def test_loss_that_holds_what_cannot_be_pickled() -> None:
    import threading

    lock = threading.Lock()

    def loss(y_true: Any, y_pred: Any) -> Any:
        with lock:
            return tf.reduce_mean(y_pred)

    model = small_cnn()
    model.compile("sgd", loss)
    with pytest.raises(errors.ShippingError, match=r"(?s)cannot be sent.*picklable.*lock"):
        _fit(model)


DATASETS = {
    "ragged": (
        lambda: tf.data.Dataset.from_tensors(
            (tf.ragged.constant([[1.0], [1.0, 2.0]]), tf.zeros((2, 1)))
        ),
        "dense tensors",
    ),
    "sparse": (
        lambda: tf.data.Dataset.from_tensors((tf.sparse.eye(3), tf.zeros((3, 1)))),
        "dense tensors",
    ),
    "scalars": (lambda: tf.data.Dataset.from_tensor_slices(([1.0], [1.0])), r"\.batch\("),
    "empty": (
        lambda: (
            tf.data.Dataset.from_tensor_slices((np.zeros((5, 4)), np.zeros(5))).batch(5).take(0)
        ),
        "empty dataset",
    ),
}


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_that_cannot_be_shipped(name: str) -> None:
    make, text = DATASETS[name]
    model = Sequential([L.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=text) as caught:
        model.fit(make(), verbose=0, num_processes=2)
    assert isinstance(caught.value, errors.NanoError)


@pytest.mark.parametrize("name", ["y", "sample_weight", "batch_size", "validation_split"])
def test_dataset_with_what_belongs_to_arrays(name: str) -> None:
    x, y = digits(20)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    value: Any = {"batch_size": 5, "validation_split": 0.5}.get(name, y)
    with pytest.raises(errors.InvalidArgumentError, match=name):
        small_cnn().fit(data, **{name: value}, verbose=0, num_processes=2)


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"y": np.zeros(7)}, "same number of samples"),
    "empty": ({"x": np.zeros((0, 8, 8, 1)), "y": np.zeros(0)}, "length 0"),
    "scalar": ({"x": np.float32(3)}, "scalar|dimension"),
    "text": ({"x": "path.csv"}, "arrays"),
    "batch_size": ({"batch_size": 0}, "batch_size=0"),
    "split": ({"validation_split": 1.5}, r"validation_split=1\.5"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    arguments, text = ARRAYS[name]
    with pytest.raises((ValueError, TypeError), match=text) as caught:
        _fit(**arguments)
    assert isinstance(caught.value, errors.NanoError)


def test_single_process_fit_still_takes_all(capfd: pytest.CaptureFixture[str]) -> None:
    """`num_processes` None and 1 are Keras's own fit, in this process."""
    for processes in (None, 1):
        _fit(num_processes=processes)
