"""Run by `test_smp_from_keras.py` with `nanotf run --smp`: `fit` of a functional model in parts.

Each rank compares with a model that it trains alone.

    keras_partitions.py FOLDER PARTITIONS
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from nanotf import smp
from nanotf.compat.keras_common import tf_variable
from nanotf.compat.keras_optimizers import optimizer_variables

FOLDER, PARTITIONS = pathlib.Path(sys.argv[1]), int(sys.argv[2])
tf.keras.backend.set_floatx("float64")
x, y = load_digits(return_X_y=True)
x, y = (x[:150] / 16).astype("float64"), y[:150]
weights = np.linspace(0.5, 1.5, len(x))


def digits() -> Any:
    """A functional model with a connection that skips a layer."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((64,), dtype="float64")
    first = layers.Dense(24, activation="tanh", dtype="float64")(inputs)
    second = layers.Dense(24, activation="relu", dtype="float64")(first)
    joined = layers.Add(dtype="float64")([first, second])
    return tf.keras.Model(inputs, layers.Dense(10, dtype="float64")(joined))


def compiled(model: Any) -> Any:
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(0.01)
    model.compile(optimizer, loss, metrics=["sparse_categorical_accuracy"])
    return model


def fit(model: Any) -> dict[str, list[float]]:
    # 120 rows: the last batch of an epoch has 2, fewer than there are microbatches.
    settings = {"batch_size": 59, "epochs": 2, "validation_split": 0.2, "verbose": 0}
    history: dict[str, list[float]] = model.fit(x, y, sample_weight=weights, **settings).history
    return history


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


smp.init({"partitions": PARTITIONS})
plain = compiled(digits())
expected = fit(plain)

given = digits()
model = compiled(smp.DistributedModel.from_keras(given, partitions=PARTITIONS, microbatches=4))
found = fit(model)
assert found.keys() == expected.keys()
for name, values in expected.items():
    equal(found[name], values)
equal(model.predict(x, verbose=0), plain.predict(x, verbose=0))
equal(model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0))

# No process has weights or slots of another partition. Adam has two slots, and some counters.
own = [tf_variable(weight) for weight in given.weights]
slots = optimizer_variables(model.optimizer)
whole = 8 * plain.count_params()
for found, expected_bytes in ((own, whole), (slots, 2 * whole)):
    # By the operation itself: a variable of another partition refuses to be read.
    held = [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in found]
    resident = sum(int(tf.size(value)) * value.dtype.size for value in held)
    everywhere = sum(smp.allgather(resident, smp.CommGroup.MP_GROUP))
    assert expected_bytes <= everywhere <= 1.1 * expected_bytes, (everywhere, expected_bytes)

report = smp.last_report()
of_copy = [each for each in report.ranks if each.copy == smp.dp_rank()]
assert sum(each.weight_bytes for each in of_copy) == whole
assert all(each.peak_bytes > 0 for each in report.ranks)
if PARTITIONS > 1:  # of a step that trained, though an evaluation came last
    assert [len(each.blocks) for each in report.ranks] == [8, 8]

model.save_model(FOLDER / "digits.keras")
loaded = tf.keras.models.load_model(FOLDER / "digits.keras")
equal(loaded.predict(x, verbose=0), plain.predict(x, verbose=0))
print(f"rank {smp.rank()}: done", flush=True)
