"""What of a recipe stays the same when a model is built again. No TensorFlow."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nanotf.parent.auto_key import digest_of


def _digest(value: Any, *others: str) -> str:
    return digest_of(pickle.dumps(value, protocol=5), others)


def _layer(kind: str, name: str, **config: Any) -> dict[str, Any]:
    return {"class_name": kind, "config": {"name": name, **config}}


def _model(*layers: Any, **more: Any) -> dict[str, Any]:
    return {"name": "sequential", "layers": list(layers), **more}


ALIKE: dict[str, tuple[Any, Any]] = {
    "numbers": (
        _model(_layer("Dense", "dense"), _layer("Dense", "dense_1"), loss={"dense_1": "mse"}),
        _model(_layer("Dense", "dense_9"), _layer("Dense", "dense_10"), loss={"dense_10": "mse"}),
    ),
    # The word is the name of the first one, and means something else, too.
    "a name that is a word": (
        _model(_layer("Dense", "dense", activation="softmax"), _layer("Softmax", "softmax")),
        _model(_layer("Dense", "dense_1", activation="softmax"), _layer("Softmax", "softmax_1")),
    ),
    "made from another name": (
        [_layer("LSTM", "forward_lstm"), _layer("InputLayer", "dense_12_input"), "Dense"],
        [_layer("LSTM", "forward_lstm_1"), _layer("InputLayer", "dense_2_input"), "Dense"],
    ),
    "classes of several words": (
        [_layer("AdamW", "adam_w"), _layer("Conv2D", "conv2d_1"), _layer("_Own", "private__own")],
        [_layer("AdamW", "adam_w_7"), _layer("Conv2D", "conv2d"), _layer("_Own", "private__own_1")],
    ),
    "a class that travels by value": (["Own", "0" * 32, "b"], ["Own", "1" * 32, "b"]),
    "beside a name that the user chose": (
        [_layer("Conv2D", "dense_1"), _layer("Dense", "dense_5")],
        [_layer("Conv2D", "dense_1"), _layer("Dense", "dense_2")],
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_built_again(name: str) -> None:
    one, two = ALIKE[name]
    assert _digest(one) == _digest(two)


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "which output has which loss": (
        _model(_layer("Dense", "dense"), _layer("Dense", "dense_1"), loss={"dense_1": "mse"}),
        _model(_layer("Dense", "dense"), _layer("Dense", "dense_1"), loss={"dense": "mse"}),
    ),
    "one layer used twice, or two": (
        _model(_layer("Dense", "dense"), _layer("Dense", "dense")),
        _model(_layer("Dense", "dense"), _layer("Dense", "dense_1")),
    ),
    "names that the user chose": (
        _model(_layer("Dense", "d"), name="resnet_18"),
        _model(_layer("Dense", "d"), name="resnet_50"),
    ),
    "what is no name": (
        _model(_layer("Dense", "dense", mode="dense_3")),
        _model(_layer("Dense", "dense", mode="dense_4")),
    ),
    "the place of a string": (["ab", "c"], ["a", "bc"]),
    "its type": (["1"], [1]),
    "which object is meant": ([x := [1], y := [1], x], [x, y, y]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_really_different(name: str) -> None:
    one, two = DIFFERENT[name]
    assert _digest(one) != _digest(two)


def test_whether_equal_strings_are_one_object_does_not_count() -> None:
    name, twin = "a b", "a b c"[:3]
    assert name is not twin
    assert _digest([name, name, [1]]) == _digest([name, twin, [1]])


def test_names_in_other_texts() -> None:
    one, two = _layer("InputLayer", "input_1"), _layer("InputLayer", "input_7")
    assert _digest(one, "{'input_1': 5}") == _digest(two, "{'input_7': 5}")
    assert _digest(one, "{'input_1': 5}") != _digest(two, "{'input_1': 5}")
