"""The key of a model's measurement."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from nanotf.parent.auto.step_key import description_of, digest_of

L = tf.keras.layers


def _model(
    optimizer: str = "adam",
    loss: str = "mse",
    strides: int = 1,
    trainable: bool = True,
    layer: Any = L.Conv1D,
    units: int = 1,
    **arguments: Any,
) -> Any:
    given = tf.keras.Input((8, 4))
    x = layer(4, 3, strides=strides, trainable=trainable)(given)
    out = [L.Dense(units)(L.Flatten()(x)) for _ in range(2)]
    model = tf.keras.Model(given, out)
    model.compile(optimizer, dict.fromkeys(model.output_names, loss), **arguments)
    return model


def _digest(**changes: Any) -> str:
    return digest_of(description_of(_model(**changes)))


def test_a_rebuilt_model_has_the_same_key() -> None:
    assert _digest() == _digest()


@pytest.mark.parametrize(
    "change",
    [
        {"units": 2},
        {"strides": 2},
        {"trainable": False},
        {"layer": L.SeparableConv1D},
        {"optimizer": "sgd"},
        {"loss": "mae"},
        {"steps_per_execution": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_has_another_key(change: dict[str, Any]) -> None:
    assert _digest(**change) != _digest()


def test_shapes_and_positions_count_but_names_do_not() -> None:
    one, two = (tf.TensorSpec([None, rows]) for rows in (1, 2))
    assert digest_of({"input_1": one, "b": 5}) == digest_of({"input_7": one, "b": 5})
    assert digest_of({"input_1": one}) != digest_of({"input_1": two})
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("1") != digest_of(1)
