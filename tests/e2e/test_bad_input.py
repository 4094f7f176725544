"""Bad input raises a clear exception and starts no process."""

from __future__ import annotations

import pathlib
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import digits, small_cnn

import nanotf
from nanotf import errors
from nanotf.collectives import native_library
from nanotf.compat.versions import is_keras_3, keras_version
from nanotf.keras import Model, Sequential, nano
from nanotf.parent.map import item_call
from nanotf.parent.where import Where
from nanotf.pool import backends, transports
from nanotf.shipping.data.pipelines import SHARDINGS

pytestmark = pytest.mark.own_pool

L = tf.keras.layers
KERAS_3 = is_keras_3()
PyDataset: Any = tf.keras.utils.PyDataset if KERAS_3 else tf.keras.utils.Sequence


@pytest.fixture(autouse=True)
def _no_process_is_started() -> Iterator[None]:
    yield
    assert nanotf.worker_pids() == ()


def _complaint(call: Callable[[], Any], kind: Any, text: str) -> str:
    """Returns "" if a call raises `kind` with `text` and starts no process, else the difference."""
    try:
        call()
    except Exception as error:
        if nanotf.worker_pids():
            nanotf.shutdown()
            return "started processes"
        if isinstance(error, kind) and re.search(text, str(error), re.DOTALL):
            return ""
        return f"raised {error!r}"
    return "raised nothing"


def _assert_refused(cases: dict[str, tuple[Callable[[], Any], Any, str]]) -> None:
    """Asserts that each case raises; a case is a call, the exception's class and its text."""
    wrong = {name: _complaint(*case) for name, case in cases.items()}
    _assert_none({name: complaint for name, complaint in wrong.items() if complaint})


def _assert_none(wrong: dict[str, str]) -> None:
    assert not wrong, "".join(f"\n{name}: {complaint}" for name, complaint in wrong.items())


def _fit(model: Any = None, **arguments: Any) -> None:
    x, y = digits(20)
    model = small_cnn() if model is None else model
    model.fit(**{"x": x, "y": y, "verbose": 0, "num_processes": 2, **arguments})


def test_numbers_of_processes_and_cores() -> None:
    of_processes: list[tuple[Any, Any, str]] = [
        (0, ValueError, "num_processes=0"),
        (-1, ValueError, "num_processes=-1"),
        (True, TypeError, "num_processes=True"),
        (2.0, TypeError, r"num_processes=2\.0"),
        ("2", TypeError, r"num_processes='2'.* Only fit\(\) and nanotf.map\(\) take"),
        (10**6, errors.PlacementError, r"1000000.*\b\d+ can be used"),
    ]
    of_cores: list[tuple[int, Any, str]] = [
        (10**6, errors.PlacementError, "cores_per_process"),
        (0, ValueError, "cores_per_process=0"),
        (-2, ValueError, "cores_per_process=-2"),
    ]
    _assert_refused(
        {
            f"{name}={value!r}": (lambda n=name, v=value: _fit(**{n: v}), kind, text)
            for name, cases in (("num_processes", of_processes), ("cores_per_process", of_cores))
            for value, kind, text in cases
        }
    )


def test_numbers_of_processes_of_evaluate_and_predict() -> None:
    """Neither accepts "auto"."""
    auto = r"='auto' \(str\).* Only fit\(\) and nanotf.map\(\) take"
    model = small_cnn()
    _assert_refused(
        {
            "evaluate, 2.0": (lambda: model.evaluate(X, Y, num_processes=2.0), TypeError, r"=2\.0"),
            "evaluate, auto": (lambda: model.evaluate(X, Y, num_processes="auto"), TypeError, auto),
            "predict, auto": (lambda: model.predict(X, num_processes="auto"), TypeError, auto),
        }
    )


def test_unknown_choices_are_refused() -> None:
    """With and without workers, each error lists the valid choices."""
    model, data = small_cnn(), _dataset()
    choices: dict[str, tuple[str, Sequence[str]]] = {
        "transport": ("carrier pigeon", transports.TRANSPORTS),
        "backend": ("Ray", tuple(backends.BACKENDS)),
        "sharding": ("rows", SHARDINGS),
    }
    cases = {}
    for name, (value, known) in choices.items():
        listed = ", ".join(map(repr, known))
        rule = re.escape(f"`{name}` must be one of {listed}. Received: {name}={value!r}.")
        calls: dict[str, Callable[..., Any]] = {"fit": lambda **given: model.fit(data, **given)}
        if name != "sharding":
            calls["predict"] = lambda **given: model.predict(X, **given)
        if name == "backend":
            calls["nano"] = nanotf.keras.nano
        for method, call in calls.items():
            for processes in (None, 1, 2):
                given = {name: value, "num_processes": processes}
                cases[f"{method}({given})"] = (
                    lambda call=call, given=given: call(**given),
                    errors.InvalidArgumentError,
                    rule,
                )
    _assert_refused(cases)


def test_several_workers_need_the_native_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "_shm.so")
    x, _ = digits(20)
    calls: dict[str, Callable[[], Any]] = {
        "fit": _fit,
        "auto": lambda: _fit(num_processes="auto"),
        "evaluate": lambda: small_cnn().evaluate(*digits(20), num_processes=2),
        "predict": lambda: small_cnn().predict(x, num_processes=2),
        "nano": nano(num_processes=2)(lambda: None),
        "warm_up": lambda: nanotf.warm_up(2),
    }
    text = (
        r"Several workers need .*Received: _shm\.so was not built\..*python -m nanotf\.collectives"
        r"\.build.*ziglang.*transport=\"grpc\""
    )
    _assert_refused({name: (call, errors.NanoError, text) for name, call in calls.items()})
    assert Where.of(2, transport="grpc").plan("fit") is not None
    assert item_call._plan(2, None, None, 2).size == 2


def test_endless_data() -> None:
    data = _dataset().repeat()
    with pytest.raises(ValueError, match=r"never ends|infinite dataset"):
        small_cnn().evaluate(data, num_processes=2)


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
    """A layer derived from plain Keras, with a required argument and no get_config."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.flatten = L.Flatten()
        self.dense = L.Dense(width.width)

    def call(self, inputs: Any) -> Any:
        return self.dense(self.flatten(inputs))


class Connected(Wide):
    """A layer sent by its attributes, one of which cannot be sent."""

    def __init__(self, width: Width) -> None:
        super().__init__(width)
        self.connection = socket.socket()


def test_model_with_an_unpicklable_attribute() -> None:
    model = nanotf.accelerate(Connected(Width(10)))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    what = (
        r"The model 'connected'.*`connection` of Connected 'connected', an object of class socket"
    )
    with pytest.raises(errors.ShippingError, match=what):
        _fit(model)
    model.connection.close()


def test_loss_with_an_unpicklable_attribute() -> None:
    with socket.socket() as connection:

        def loss(y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(y_pred) * connection.fileno()

        model = small_cnn()
        model.compile("sgd", loss)
        with pytest.raises(errors.ShippingError, match=r"(?s)cannot be sent.*picklable.*socket"):
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
}
if KERAS_3:  # Keras 2 rejects it itself
    DATASETS["empty"] = (lambda: _dataset(np.zeros((5, 4)), np.zeros(5)).take(0), "empty dataset")


def test_datasets_that_cannot_be_shipped() -> None:
    model = Sequential([L.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    _assert_refused(
        {
            name: (
                lambda make=make: model.fit(make(), verbose=0, num_processes=2),
                (errors.ShippingError, errors.InvalidArgumentError),
                text,
            )
            for name, (make, text) in DATASETS.items()
        }
    )


# ----------------------------------------------------- what Keras rejects, in Keras's words
def _generator(*batches: Any) -> Iterator[Any]:
    yield from batches


class Batches(PyDataset):
    """Data of two batches, or of a given number."""

    def __init__(self, batch: Any, number: int = 2) -> None:
        super().__init__()
        self.batch = batch
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        return self.batch


def _two_outputs() -> Any:
    inputs = L.Input((8, 8, 1))
    flat = L.Flatten()(inputs)
    model = Model(inputs, [L.Dense(1)(flat), L.Dense(1)(flat)])
    model.compile("sgd", ["mse", "mse"])
    return model


def _linear(**compiled: Any) -> Any:
    model = Sequential([L.Input((8, 8, 1)), L.Flatten(), L.Dense(10)])
    if compiled:
        model.compile("sgd", **compiled)
    return model


X, Y = digits(20)
ONES = np.ones(20)
ALL_CLASSES = dict.fromkeys(range(10), 1.0)


def _dataset(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(5)


REJECTED: dict[str, Callable[[], dict[str, Any]]] = {
    # models
    "not_compiled": lambda: {"model": _linear()},
    "no_loss": lambda: {"model": _linear(loss=None)},
    "unknown_argument": lambda: {"batchsize": 3},
    # shapes and lengths
    "no_x": lambda: {"x": None},
    "nothing": lambda: {"x": None, "y": None},
    "no_y": lambda: {"y": None},
    "length_of_y": lambda: {"y": Y[:7]},
    "length_of_weights": lambda: {"sample_weight": np.ones(3)},
    "length_of_validation": lambda: {"validation_data": (X, Y[:3])},
    "shape_of_x": lambda: {"x": X[:, :5]},
    "two_inputs_for_one": lambda: {"model": _two_outputs(), "x": [X], "y": [Y[:3], Y]},
    "scalar": lambda: {"x": np.float32(3)},
    "scalar_array": lambda: {"x": np.array(3.0)},
    "empty": lambda: {"x": X[:0], "y": Y[:0]},
    # kinds
    "text": lambda: {"x": "path.csv"},
    "numbers": lambda: {"x": [1.0, 2.0], "y": np.zeros(2)},
    "validation_of_four": lambda: {"validation_data": (X, Y, Y, Y)},
    "validation_text": lambda: {"validation_data": "text"},
    "validation_numbers": lambda: {"validation_data": (3, 4)},
    # weights
    "two_kinds_of_weights": lambda: {"sample_weight": ONES, "class_weight": ALL_CLASSES},
    "missing_classes": lambda: {"class_weight": {3: 1.0, 7: 2.0}},
    "class_weight_of_two": lambda: {
        "model": _two_outputs(),
        "y": [Y, Y],
        "class_weight": {0: 1.0, 1: 2.0},
    },
    "weights_for_one_of_two": lambda: {
        "model": _two_outputs(),
        "y": [Y, Y],
        "sample_weight": [ONES],
    },
    "class_weight_of_generator": lambda: {
        "x": _generator((X, Y)),
        "y": None,
        "class_weight": ALL_CLASSES,
    },
    "class_weight_of_weighted_dataset": lambda: {
        "x": _dataset(X, Y, ONES),
        "y": None,
        "class_weight": ALL_CLASSES,
    },
    # arguments for arrays alone
    "dataset_and_y": lambda: {"x": _dataset()},
    "dataset_and_weights": lambda: {"x": _dataset(), "y": None, "sample_weight": ONES},
    "dataset_and_split": lambda: {"x": _dataset(), "y": None, "validation_split": 0.5},
    "generator_and_y": lambda: {"x": _generator((X, Y))},
    "generator_and_weights": lambda: {
        "x": _generator((X, Y)),
        "y": None,
        "sample_weight": ONES,
    },
    "generator_and_split": lambda: {"x": _generator((X, Y)), "y": None, "validation_split": 0.5},
    "py_dataset_and_y": lambda: {"x": Batches((X, Y))},
    "py_dataset_and_weights": lambda: {
        "x": Batches((X, Y)),
        "y": None,
        "sample_weight": ONES,
    },
    "py_dataset_and_split": lambda: {
        "x": Batches((X, Y)),
        "y": None,
        "validation_split": 0.5,
    },
    # elements of generators
    "generator_of_nothing": lambda: {"x": _generator(), "y": None},
    "generator_of_arrays": lambda: {"x": _generator(X), "y": None},
    "generator_of_four": lambda: {"x": _generator((X, Y, Y, Y)), "y": None},
    "generator_of_numbers": lambda: {"x": _generator((1.0, 2.0)), "y": None},
    "py_dataset_of_nothing": lambda: {"x": Batches((X, Y), 0), "y": None},
    "py_dataset_of_text": lambda: {"x": Batches("text"), "y": None},
    "py_dataset_of_four": lambda: {"x": Batches((X, Y, Y, Y)), "y": None},
    "no_batches": lambda: {"x": _dataset().take(0), "y": None},
    # numbers
    "split_of_all": lambda: {"validation_split": 1.0},
    "no_rows_in_a_batch": lambda: {"batch_size": 0},
    "batch_size": lambda: {"batch_size": -1},
    "half_a_row": lambda: {"batch_size": 2.5},
    "text_as_batch_size": lambda: {"batch_size": "8"},
    "no_steps": lambda: {"steps_per_epoch": 0},
    "no_epochs": lambda: {"epochs": 0},
    "initial_epoch_below_0": lambda: {"initial_epoch": -1},
    "no_workers": lambda: {"x": Batches((X, Y)), "y": None, "workers": 0},
    "half_a_step": lambda: {"steps_per_epoch": 1.5},
    "half_an_epoch": lambda: {"epochs": 1.5},
    "text_as_epochs": lambda: {"epochs": "a"},
    "half_an_initial_epoch": lambda: {"initial_epoch": 0.5},
    # checks of Keras at the end of the first epoch
    "validation_freq": lambda: {"validation_data": (X, Y), "validation_freq": "a"},
    "validation_freq_of_0": lambda: {"validation_data": (X, Y), "validation_freq": 0},
    "half_a_validation_step": lambda: {"validation_data": (X, Y), "validation_steps": 1.5},
    "validation_without_targets": lambda: {"validation_data": (X,)},
    "validation_of_an_array": lambda: {"validation_data": X},
    "validation_dataset_without_targets": lambda: {"validation_data": _dataset(X)},
    "shape_of_validation": lambda: {"validation_data": (X[:, :5], Y)},
    "shape_of_validation_dataset": lambda: {"validation_data": _dataset(X[:, :5], Y)},
    # evaluate and predict
    "evaluate_without_targets": lambda: {"method": "evaluate", "y": None},
    "evaluate_two_targets": lambda: {"method": "evaluate", "y": [Y, Y]},
    "evaluate_shape": lambda: {"method": "evaluate", "x": X[:, :5]},
    "evaluate_length": lambda: {"method": "evaluate", "y": Y[:3]},
    "evaluate_half_a_step": lambda: {"method": "evaluate", "steps": 1.5},
    "evaluate_not_compiled": lambda: {"method": "evaluate", "model": _linear()},
    "evaluate_unknown_argument": lambda: {"method": "evaluate", "batchsize": 3},
    "predict_unknown_argument": lambda: {"method": "predict", "batchsize": 3},
    "predict_of_nothing": lambda: {"method": "predict", "x": None},
    "predict_shape": lambda: {"method": "predict", "x": X[:, :5]},
    "predict_one_dimension": lambda: {"method": "predict", "x": ONES},
    "predict_text": lambda: {"method": "predict", "x": "path.csv"},
    "predict_half_a_step": lambda: {"method": "predict", "steps": 1.5},
}

# Keras 3 accepts these, and so does nanotf. With empty data, an epoch has no steps.
TAKEN_BY_KERAS_3 = {
    "two_inputs_for_one",
    "missing_classes",
    "no_rows_in_a_batch",
    "no_steps",
    "no_epochs",
    "initial_epoch_below_0",
    "empty",
    "no_batches",
}
TAKEN_BY_KERAS_2 = {
    "weights_for_one_of_two",
    "class_weight_of_generator",
    "validation_without_targets",
    "validation_dataset_without_targets",
    "half_a_step",
    "half_a_validation_step",
    "evaluate_half_a_step",
    "predict_half_a_step",
}
if keras_version() < (2, 16):  # it checks fewer numbers
    TAKEN_BY_KERAS_2 |= {"no_rows_in_a_batch", "no_epochs", "no_workers", "initial_epoch_below_0"}


def _rejection(given: dict[str, Any], **more: Any) -> tuple[str, str]:
    """Returns the class and the text of the exception of a model's method, `fit` by default."""
    arguments = {"x": X, "y": Y, "verbose": 0, **given, **more}
    # A new model each time: a step that raised while it was traced leaves state behind.
    compiled = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    model = arguments.pop("model", None) or _linear(**compiled)
    method = arguments.pop("method", "fit")
    if method == "predict":
        del arguments["y"]
    try:
        getattr(model, method)(**arguments)
    except Exception as error:
        # Without the numbers of layers, which count up, the addresses of objects, and the margin
        # of a text in a step's frames.
        text = re.sub(r"_\d+|0x[0-9a-f]+", "", str(error))
        return type(error).__name__, " ".join(text.split())
    return "", ""


@pytest.mark.both_generations
def test_rejected_as_by_keras() -> None:
    taken = TAKEN_BY_KERAS_3 if KERAS_3 else TAKEN_BY_KERAS_2
    wrong = {}
    for name in sorted(REJECTED.keys() - taken):
        expected = _rejection(REJECTED[name]())
        found = _rejection(REJECTED[name](), num_processes=2)
        if nanotf.worker_pids():
            nanotf.shutdown()
            wrong[name] = "started processes"
        # If Keras 2 notices the error in its step, it adds the step's frames.
        elif (
            not found[0]
            or found[0] != expected[0]
            or found[1] not in expected[1]
            or bool(found[1]) != bool(expected[1])
        ):
            wrong[name] = f"raised {found!r}, and Keras {expected!r}"
    _assert_none(wrong)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 rejects these itself")
def test_rejected_although_keras_takes_it() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    refused = errors.InvalidArgumentError
    _assert_refused(
        {
            "empty": (lambda: _fit(x=X[:0], y=Y[:0]), refused, "length 0"),
            "empty, predict": (
                lambda: small_cnn().predict(X[:0], num_processes=2),
                refused,
                "length 0",
            ),
            "ragged": (lambda: _fit(x=ragged, y=Y[:2]), refused, "dense"),
            "sparse": (lambda: _fit(x=tf.sparse.eye(20)), refused, "dense"),
        }
    )


def test_ragged_arrays() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(errors.ShippingError, match=r"(?s)dense.*to_tensor\(\)"):
        _fit(x=ragged, y=Y[:2])


def test_single_process_fit_accepts_all_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    """With `num_processes` None or 1, Keras's own fit runs in this process."""
    for processes in (None, 1):
        _fit(num_processes=processes)
