"""`nanotf.data.pad_batches`: batches of one shape, the same losses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import nanotf
from nanotf.compat.versions import keras_version

ROWS, BATCH = 11, 4
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 2))
WEIGHTS = rng.uniform(1.0, 2.0, size=ROWS)


def _dataset(*arrays: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def _trained(dataset: Any, outputs: int = 1, loss: Any = "mse", **fit: Any) -> Any:
    """Returns what a model has learned: the weights after two epochs, and each logged metric."""
    inputs = tf.keras.layers.Input((3,), name="a")
    dense = [
        tf.keras.layers.Dense(2, "tanh", name=f"y{i}", kernel_initializer="ones")
        for i in range(outputs)
    ]
    model = tf.keras.Model({"a": inputs}, {layer.name: layer(inputs) for layer in dense})
    model = nanotf.accelerate(model)
    each = {layer.name: loss for layer in dense}
    metrics = {layer.name: ["mae"] for layer in dense}
    model.compile(tf.keras.optimizers.SGD(0.1), each, weighted_metrics=metrics)
    history = model.fit(dataset, epochs=2, verbose=0, **fit).history
    return model.get_weights(), history


def _named(dataset: Any, outputs: int = 1) -> Any:
    def name(x: Any, y: Any, *weights: Any) -> Any:
        named = [{f"y{i}": value * (i + 1) for i in range(outputs)} for value in (y, *weights)]
        return {"a": x}, *named

    return dataset.map(name)


def _same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize("weights", [(), (WEIGHTS,)], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_training_is_the_same(float64: None, weights: Any, outputs: int) -> None:
    short = _named(_dataset(X, Y, *weights), outputs)
    padded = nanotf.data.pad_batches(short, BATCH)
    assert {leaf.shape[0] for leaf in tf.nest.flatten(padded.element_spec)} == {BATCH}
    _same(_trained(padded, outputs)[0], _trained(short, outputs)[0])


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_other_reductions_and_their_metrics(float64: None, reduction: str) -> None:
    if reduction != "sum" and keras_version() < (3,):
        pytest.skip("Keras 2 has no such reduction")
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    short = _named(_dataset(X, Y, WEIGHTS))
    ours, logs = _trained(nanotf.data.pad_batches(short, BATCH, reduction), loss=loss)
    theirs, expected = _trained(short, loss=loss)
    _same(ours, theirs)
    (mae,) = [name for name in logs if name.endswith(("mae", "error"))]
    np.testing.assert_allclose(logs[mae], expected[mae], rtol=1e-10)  # over all batches


def test_workers(float64: None) -> None:
    short = _named(_dataset(X, Y))
    padded = nanotf.data.pad_batches(short, BATCH)
    _same(_trained(padded, num_processes=2)[0], _trained(short)[0])


def test_rows() -> None:
    integers = tf.data.Dataset.from_tensor_slices((["a", "b", "c"], [1, 2, 3], [1, 2, 3])).batch(2)
    *_, (x, y, weights) = nanotf.data.pad_batches(integers, 2)
    assert x.numpy().tolist() == [b"c", b"c"]
    assert y.numpy().tolist() == [3, 3]
    assert weights.numpy().tolist() == [6.0, 0.0]
    too_long = nanotf.data.pad_batches(integers, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than 1 rows"):
        next(iter(too_long))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: (_dataset(X).map(lambda x: x), 4), "Add the targets"),
        (lambda: (_dataset(X), 4), "Add the targets"),
        (lambda: (tf.data.Dataset.from_tensors((1.0, 2.0)), 4), "Call `dataset.batch(batch_size)`"),
        (lambda: (_dataset(X, Y), 0), "Received: batch_size=0"),
        (lambda: (_dataset(X, Y), None), "Received: batch_size=None"),
        (lambda: (_dataset(X, Y), True), "Received: batch_size=True"),
        (lambda: ((X, Y), 4), "Received: dataset of class tuple"),
        (lambda: (_dataset(X, Y), 4, "mean"), "Received: reduction='mean'"),
        (
            lambda: (tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True), 4),
            "Received: batch_size=4 and TensorSpec(shape=(8, 3)",
        ),
        (
            lambda: (_dataset(X, Y).map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y)), 4),
            "pads dense tensors. Received: RaggedTensorSpec",
        ),
    ],
)
def test_refused(make: Any, text: str) -> None:
    with pytest.raises(nanotf.errors.NanoError, match=re.escape(text)):
        nanotf.data.pad_batches(*make())
