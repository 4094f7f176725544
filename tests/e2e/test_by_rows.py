"""`nanotf.by_rows`: the user declares that a layer may be divided; workers check it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import parity
import pytest
import tensorflow as tf

import nanotf
from nanotf import errors
from nanotf.keras import Sequential

L = tf.keras.layers
pytestmark = pytest.mark.both_generations


class InNumPy(L.Layer):  # type: ignore[misc]
    """Sorts each row in NumPy, and writes to a file how many rows it got."""

    def __init__(self, log: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.log = log

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def in_numpy(self, x: Any) -> Any:
        if self.log:
            with pathlib.Path(self.log).open("a") as file:
                file.write(f"{len(x)}\n")
        return np.sort(x, -1)

    def call(self, x: Any) -> Any:
        out = tf.numpy_function(self.in_numpy, [x], x.dtype)
        out.set_shape(x.shape)
        return self.scale * out + x


class OfTheBatch(InNumPy):
    def in_numpy(self, x: Any) -> Any:
        return np.sort(x, -1) + x.mean(0)


class WithGradientOfTheBatch(InNumPy):
    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def wrong(x: Any) -> Any:
            return tf.identity(
                x
            ), lambda d: d - tf.numpy_function(lambda v: v.mean(0), [d], d.dtype)

        return self.scale * wrong(x)


class Drawing(InNumPy):
    def call(self, x: Any) -> Any:
        return super().call(x) + tf.random.stateless_normal(tf.shape(x), (1, 2), dtype=x.dtype)


class WithLoss(InNumPy):
    def call(self, x: Any) -> Any:
        out = super().call(x)
        self.add_loss(tf.reduce_sum(out))
        return out


class Summed(InNumPy):
    def call(self, x: Any) -> Any:
        return tf.reduce_sum(super().call(x))


class Assigning(InNumPy):
    def build(self, shape: Any) -> None:
        super().build(shape)
        self.seen = self.add_weight(shape=(), initializer="zeros", name="seen", trainable=False)

    def call(self, x: Any) -> Any:
        self.seen.assign_add(1.0)
        return super().call(x)


def model_with(layer: Any, **options: Any) -> Any:
    tf.keras.utils.set_random_seed(1)
    model = Sequential([L.Input((5,)), L.Dense(4, "tanh"), layer, L.Dense(2)])
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", **options)
    return model


def data(rows: int) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(rows, 5))
    return x, x[:, :2] ** 2


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "run_eagerly"),
    [(22, False), pytest.param(24, False, marks=pytest.mark.thorough), (22, True)],
)
def test_the_same_as_one_process(
    float64: None, tmp_path: pathlib.Path, rows: int, run_eagerly: bool
) -> None:
    x, y = data(rows)
    results = []
    for options in ({}, {"num_processes": 2}):
        log = str(tmp_path / "rows") if options else ""
        model = model_with(nanotf.by_rows(InNumPy(log)), run_eagerly=run_eagerly)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, **options)
        predicted = model.predict(x, batch_size=8, verbose=0, **options)
        results.append((history.history, model.get_weights(), predicted))
    (theirs, weights, expected), (ours, found, predicted) = results
    parity.assert_same_history(ours, theirs)
    np.testing.assert_allclose(predicted, expected, rtol=1e-9)
    for one, other in zip(found, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    steps = 2 * -(-rows // 8)
    counts = (tmp_path / "rows").read_text().split()
    compared = 2 * 3  # at the 1st, 2nd and 4th call, on both workers
    assert counts.count("8") + counts.count(str(rows % 8 or 8)) >= compared
    assert counts.count("4") > steps  # the rest, on half of the rows


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layer", "raised", "said"),
    [
        (OfTheBatch, tf.errors.InvalidArgumentError, r"output 0 has other values.*Values"),
        (WithGradientOfTheBatch, tf.errors.InvalidArgumentError, r"the gradient of argument 0 has"),
        (Assigning, tf.errors.InvalidArgumentError, r"an assignment to .*seen.* has other values"),
        (Drawing, errors.ModelError, "which draws random numbers. Leave nanotf.by_rows out"),
        (WithLoss, errors.ModelError, "which adds losses. Leave nanotf.by_rows out"),
        (Summed, errors.ModelError, "which returns a scalar. Leave nanotf.by_rows out"),
    ],
)
def test_wrong_declarations(layer: Callable[[], Any], raised: Any, said: str) -> None:
    x, y = data(16)
    model = model_with(nanotf.by_rows(layer())) if layer is not Summed else None
    if model is None:
        inputs = L.Input((5,))
        summed = nanotf.by_rows(Summed())(inputs)
        model = nanotf.keras.Model(inputs, L.Dense(2)(inputs) + summed)
        model.compile("sgd", "mse")
    with pytest.raises(raised, match=f"(?s){said}"):
        model.fit(x, y, batch_size=8, verbose=0, num_processes=2)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "policy"), [(9, "mixed_bfloat16"), pytest.param(1, None, marks=pytest.mark.thorough)]
)
def test_beside_the_usual(rows: int, policy: str | None) -> None:
    """Mixed precision, of which NumPy does not know the dtype; a worker without rows."""
    x, y = data(rows)
    model = model_with(nanotf.by_rows(InNumPy(dtype=policy)))
    expected = model.predict(x, batch_size=8, verbose=0)
    found = model.predict(x, batch_size=8, verbose=0, num_processes=2)
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, num_processes=2).history
    assert np.isfinite(history["loss"]).all()


def test_takes_layers() -> None:
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"by_rows\(\) takes a layer"):
        nanotf.by_rows(3)
