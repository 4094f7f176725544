"""Keras models of all kinds, with rows for each, for the tests of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

L = tf.keras.layers
RNG = np.random.default_rng(0)
WIDE = 2**24 + 1  # float32 has no such number


class Remainder(L.Layer):
    """The remainder of ids: it shows whether they came as they are."""

    def call(self, ids: Any) -> Any:
        return tf.cast(ids % 1000, "float32")


class Halves(tf.keras.Model):
    """A subclassed model, which takes and returns dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(4)

    def call(self, inputs: Any, training: Any = None) -> Any:
        h = self.dense(inputs["x"])
        return {"low": h[:, :2], "rest": [h[:, 2:3], h[:, 3:]]}


def _dense() -> Any:
    return tf.keras.Sequential([L.Input((8,), name="x"), L.Dense(16, "relu"), L.Dense(3)])


def _conv() -> Any:
    return tf.keras.Sequential(
        [
            L.Input((8, 8, 1)),
            L.Conv2D(4, 3, activation="relu"),
            L.BatchNormalization(),
            L.Dropout(0.5),
            L.Flatten(),
            L.Dense(3),
        ]
    )


def _lstm() -> Any:
    ids = L.Input((7,), dtype="int32", name="ids")
    return tf.keras.Model(ids, L.Dense(2)(L.LSTM(6)(L.Embedding(50, 5)(ids))))


def _several() -> Any:
    b, a = L.Input((8,), name="b"), L.Input((4,), name="a")  # not in the order of the names
    h = L.Concatenate()([b, a])
    return tf.keras.Model([b, a], [L.Dense(3, name="q")(h), L.Dense(1, name="p")(h)])


def _dicts() -> Any:
    b, a = L.Input((8,), name="b"), L.Input((4,), name="a")
    h = L.Concatenate()([b, a])
    return tf.keras.Model({"b": b, "a": a}, {"z": L.Dense(3)(h), "y": L.Dense(1)(h)})


def _ids() -> Any:
    ids = L.Input((3,), dtype="int32", name="ids")
    return tf.keras.Model(ids, Remainder(name="remainder")(ids))


def _text() -> Any:
    layer = L.TextVectorization(output_sequence_length=4)
    layer.adapt(tf.constant(["a b c", "d e f"]))
    text = L.Input((1,), dtype="string", name="text")
    return tf.keras.Model(text, L.Dense(2)(L.Flatten()(L.Embedding(20, 3)(layer(text)))))


def _subclassed() -> Any:
    model = Halves()
    model.predict({"x": _floats(3, 8)}, verbose=0)
    return model


def _floats(*shape: int) -> Any:
    return RNG.normal(size=shape).astype("float32")


Rows = Callable[[int], Any]

# Of each kind a function that returns a model, and one that returns a number of rows for it.
MODELS: dict[str, tuple[Callable[[], Any], Rows]] = {
    "dense": (_dense, lambda n: _floats(n, 8)),
    "conv": (_conv, lambda n: _floats(n, 8, 8, 1)),
    "lstm": (_lstm, lambda n: RNG.integers(0, 50, (n, 7)).astype("int32")),
    "several": (_several, lambda n: [_floats(n, 8), _floats(n, 4)]),
    "dicts": (_dicts, lambda n: {"a": _floats(n, 4), "b": _floats(n, 8)}),
    "ids": (_ids, lambda n: (WIDE + RNG.integers(0, 1000, (n, 3))).astype("int32")),
    "text": (_text, lambda n: np.resize(np.array([["a c"], ["f q"], ["b"]], object), (n, 1))),
    "subclassed": (_subclassed, lambda n: {"x": _floats(n, 8)}),
}


def model_and_rows(kind: str) -> tuple[Any, Rows]:
    """Returns a model of a kind, and the function that makes its rows."""
    tf.keras.utils.set_random_seed(1)
    make, rows = MODELS[kind]
    return make(), rows


def keras_result(model: Any, x: Any) -> Any:
    """Returns what `model.predict` returns; Keras takes text as tensors."""
    is_text = isinstance(x, np.ndarray) and x.dtype.kind == "O"
    return model.predict(tf.constant(x) if is_text else x, verbose=0)


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Checks structure, dtypes, shapes and numbers."""
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert isinstance(a, np.ndarray)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def check_batches(program: Any, model: Any, rows: Rows, tolerance: float = 1e-5) -> None:
    """Compares a program with Keras on batches of several sizes, and calls it on no rows."""
    for count in (7, 1, 32, 5):
        x = rows(count)
        assert_equal(program(x), keras_result(model, x), tolerance)
    shapes = [a.shape for a in tf.nest.flatten(program(rows(0)))]
    assert shapes == [(0, *a.shape[1:]) for a in tf.nest.flatten(program(rows(2)))]


class Centring(tf.Module):
    """A model whose rows depend on the other rows of their batch."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "x")])
    def serve(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"centred": x - tf.reduce_mean(x, 0)}
