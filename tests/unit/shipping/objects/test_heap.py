"""Pickled models: unpickling gives an equal model."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nanotf.errors import ShippingError
from nanotf.shipping.objects import heap

L = tf.keras.layers
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def sent(model: Any) -> Any:
    """Returns the model after a pickle round trip, with the values of the original's variables."""
    data, ours = heap.dump_model(model)
    copy, theirs = heap.load_model(data)
    assert [type(obj) for obj in theirs] == [type(obj) for obj in ours]
    for one, other in zip(ours, theirs, strict=True):
        assert one is not other
        if isinstance(one, tf.Variable):
            other.assign(one)
    np.testing.assert_array_equal(copy(X), model(X))
    return copy


def test_a_long_chain_of_layers() -> None:
    inputs = x = L.Input((4,))
    for _ in range(400):
        x = L.Activation("tanh")(x)
    sent(tf.keras.Model(inputs, L.Dense(2)(x)))


def test_layers_in_several_models_stay_one_layer() -> None:
    shared = L.Dense(4)
    inner = tf.keras.Sequential([L.Input((4,)), shared])
    inputs = L.Input((4,))
    copy = sent(tf.keras.Model(inputs, shared(inner(inputs))))
    assert copy.layers[-1] is copy.layers[1].layers[-1]
    assert len(copy.trainable_variables) == 2


def test_functions_and_tables() -> None:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), [3.0, 5.0]), -1.0
    )
    growing = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.5)
    growing.insert(tf.constant([1], tf.int64), tf.constant([7.0]))
    factor = np.arange(4.0)

    def looked_up(x: Any) -> Any:
        keys = tf.cast(x > 0, tf.int64)
        return (table.lookup(keys) + growing.lookup(keys)) * factor

    inputs = L.Input((4,))
    hidden = L.Lambda(tf.sin)(L.Lambda(looked_up, output_shape=(4,))(inputs))
    sent(tf.keras.Model(inputs, hidden))


class Holding(tf.keras.Model):  # type: ignore[misc]
    """A layer that takes a non-configurable argument, and holds an unpicklable object."""

    def __init__(self, holds: Any) -> None:
        super().__init__()
        self.parts = {"first": [L.Dense(3), L.Dense(2)]}
        self.factor = tf.Variable(2.0)
        self.holds = holds

    def call(self, x: Any) -> Any:
        for layer in self.parts["first"]:
            x = layer(x)
        return x * self.factor


def test_attributes() -> None:
    lock = threading.Lock()
    model = Holding({"lock": lock, "again": lock})
    model(X)
    model.extra = tf.constant([1.0, 2.0])
    tf.function(lambda x: setattr(model, "symbol", x))(X)
    copy = sent(model)
    assert copy.holds["lock"] is copy.holds["again"] is not lock
    assert not copy.holds["lock"].locked()
    assert copy.extra.numpy().tolist() == [1.0, 2.0]
    assert copy.symbol.shape == (8, 4) and copy.symbol.dtype == tf.float32
    assert type(copy.symbol) is type(model.symbol)
    copy.factor.assign(5.0)
    assert float(model.factor) == 2.0


def test_an_object_that_cannot_be_sent_is_named(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w") as file:
        model = Holding(file)
        model(X)
        with pytest.raises(
            ShippingError,
            match=r"`holds` of Holding 'holding\w*', an object of class _io.*open file",
        ):
            heap.dump_model(model)


def test_an_unchanged_model_gives_the_same_pickle() -> None:
    model = tf.keras.Sequential([L.Input((4,)), L.Dense(2), L.Dropout(0.5)])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, X[:, :2], verbose=0)
    before, _ = heap.dump_model(model)
    model.fit(X, X[:, :2], verbose=0)
    assert heap.dump_model(model)[0] == before


def test_a_class_that_names_its_own_object() -> None:
    """A script's class whose method names the global variable that holds the model itself."""
    script: dict[str, Any] = {"__name__": "__main__", "tf": tf}
    exec(
        "class Script(tf.keras.Model):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.out = tf.keras.layers.Dense(2)\n"
        "    def call(self, x): return self.out(x)\n"
        "    def itself(self): return named\n"
        "named = Script()\n",
        script,
    )
    named = script["named"]
    named(X)
    copy = sent(named)
    assert copy.itself() is copy
