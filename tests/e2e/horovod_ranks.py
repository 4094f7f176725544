"""Run by `test_ranks.py` with `nanotf run --ranks -n 2`: training by Horovod's API.

Each rank has its half of each batch, and compares its model with one that it trains alone on whole
batches. Prints the largest differences, and what is wrong, as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf

from nanotf.errors import CollectiveError

ROWS, BATCH, HALF = 64, 16, 8
keras = tf.keras
keras.backend.set_floatx("float64")
hvd.init()
RANK = hvd.rank()
X = np.random.default_rng(0).normal(size=(ROWS, 8))
Y = X.sum(axis=1, keepdims=True)


def mine(rows: Any) -> Any:
    """Returns this rank's half of each batch."""
    return rows.reshape(ROWS // BATCH, 2, HALF, -1)[:, RANK].reshape(ROWS // 2, -1)


def make_model(seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.layers.Input((8,)), *layers])


def difference(a: Any, b: Any) -> float:
    pairs = zip(a.get_weights(), b.get_weights(), strict=True)
    return float(max(np.abs(one - two).max() for one, two in pairs))


def alone(make: Callable[[], Any], epochs: int = 2) -> tuple[Any, list[float]]:
    model = make_model()
    model.compile(make(), "mse")
    given = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model, model.fit(X, Y, **given).history["loss"]


def fitted(optimizer: Any, rows: int = HALF, epochs: int = 2) -> tuple[Any, list[float]]:
    model = make_model(3 + RANK)
    model.compile(optimizer, "mse")
    own = hvd_keras.callbacks
    callbacks = [own.BroadcastGlobalVariablesCallback(0), own.MetricAverageCallback()]
    given = {"batch_size": rows, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(mine(X), mine(Y), callbacks=callbacks, **given).history
    return model, history["loss"]


def looped(optimizer: Any, epochs: int = 2) -> Any:
    model = make_model(3 + RANK)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    hvd.broadcast_variables(model.variables, root_rank=0)
    for _ in range(epochs):
        for begin in range(0, ROWS // 2, HALF):
            step(*(tf.constant(mine(a)[begin : begin + HALF]) for a in (X, Y)))
    return model


def collectives() -> None:
    """Compares each collective with what it should give."""
    own = tf.constant([1.0, 2.0]) * (RANK + 1)
    many = hvd.grouped_allreduce([own, tf.constant(1)], op=hvd.Sum)
    received, splits = hvd.alltoall(tf.range(3) + 10 * RANK, [1, 2])
    large = tf.constant([2**63 + RANK, RANK], tf.uint64)
    pairs: list[tuple[Any, Any]] = [
        (hvd.allreduce(own), [1.5, 3]),
        (hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0), [6, 12]),
        (hvd.allreduce(own, op=hvd.Max), [2, 4]),
        (hvd.allreduce(own, compression=hvd.Compression.fp16), [1.5, 3]),
        (hvd.allreduce(tf.constant([200], tf.uint8), op=hvd.Max), [200]),
        (hvd.allreduce(tf.constant([200], tf.uint8), op=hvd.Sum), [400 - 256]),
        (hvd.allreduce(tf.constant([200], tf.uint8)), [200]),
        (hvd.allreduce(tf.constant([100], tf.int8)), [100]),
        (hvd.allreduce(large, op=hvd.Max), np.array([2**63 + 1, 1], np.uint64)),
        (hvd.allreduce(large[::-1] if RANK else large, op=hvd.Min), [1, 0]),
        (hvd.allreduce(large, op=hvd.Sum), [1, 1]),
        (many[0], [3, 6]),
        (many[1], 2),
        (hvd.allgather(tf.fill([RANK + 1], RANK)), [0, 1, 1]),
        (hvd.broadcast(own, 1), [2, 4]),
        (hvd.alltoall(tf.range(4) + 10 * RANK), [[0, 1, 10, 11], [2, 3, 12, 13]][RANK]),
        (received, [[0, 10], [1, 2, 11, 12]][RANK]),
        (splits, [[1, 1], [2, 2]][RANK]),
        (hvd.reducescatter(tf.range(3.0), op=hvd.Sum), [[0, 2], [4]][RANK]),
        (hvd.broadcast_object({"rank": RANK}, 1)["rank"], 1),
        (hvd.allgather_object("x" * RANK)[1] == "x", True),
    ]
    for number, (found, expected) in enumerate(pairs):
        np.testing.assert_array_equal(found, expected, str(number))


def gradients() -> None:
    """Compares gradients of collectives, and sparse ones, with what they should be."""
    with tf.GradientTape(persistent=True) as tape:
        v = tf.constant([1.0, 2.0]) * (RANK + 1)
        tape.watch(v)
        reduced = tf.reduce_sum(hvd.allreduce(v) ** 2)
        gathered = tf.reduce_sum(hvd.allgather(v) * tf.constant([1.0, 2.0, 3.0, 4.0]))
        sent = tf.reduce_sum(hvd.broadcast(v, 0) * 2)
    np.testing.assert_allclose(tape.gradient(reduced, v), [3, 6])
    np.testing.assert_allclose(tape.gradient(gathered, v), [[2, 4], [6, 8]][RANK])
    np.testing.assert_allclose(tape.gradient(sent, v), [[4, 4], [0, 0]][RANK])
    table = tf.Variable(tf.zeros((3, 1)))
    for as_dense in (False, True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [RANK, 0]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense)
        grad = tape.gradient(loss, table)
        assert isinstance(grad, tf.IndexedSlices) != as_dense
        np.testing.assert_allclose(tf.convert_to_tensor(grad), [[1.5], [0.5], [0]])


def begins_again() -> None:
    """The root's weights reach all ranks at each `fit`, also with the callback of the last one."""
    model, callbacks = make_model(), [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    for seed in (3, 4):
        if RANK == 0:
            model.set_weights(make_model(seed).get_weights())
        model.fit(mine(X), mine(Y), HALF, 1, 0, callbacks=callbacks)
        for one, other in zip(*hvd.allgather_object(model.get_weights()), strict=True):
            np.testing.assert_array_equal(one, other)


def overflows() -> None:
    """A step that rank 1 must skip is skipped by all; the next one is not."""
    layer = keras.layers.Dense(1, kernel_initializer="zeros")
    layer.build((None, 1))
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0)
    for grad, expected in ((np.inf if RANK else 2.0, 0.0), (2.0, -2.0)):
        optimizer.apply_gradients([(tf.constant([[grad]], tf.float64), layer.kernel)])
        np.testing.assert_array_equal(layer.get_weights()[0], [[expected]])


def unequal() -> float:
    """Trains with more batches on rank 1. Returns the difference from one process.

    Rank 1's later gradients are averaged with zeros.
    """
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    rows = HALF * (2, ROWS // BATCH)[RANK]
    model.fit(mine(X)[:rows], mine(Y)[:rows], HALF, 1, 0, shuffle=False)
    assert hvd.join() == 1
    hvd.broadcast_variables(model.variables, root_rank=1)
    expected, optimizer = make_model(), keras.optimizers.SGD(0.1)
    for step in range(ROWS // BATCH):
        begin = step * BATCH + (0 if step < 2 else HALF)
        x, y = (a[begin : (step + 1) * BATCH] for a in (X, Y))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((expected(x) - y) ** 2) / BATCH
        grads = tape.gradient(loss, expected.trainable_variables)
        optimizer.apply_gradients(zip(grads, expected.trainable_variables, strict=True))
    return difference(model, expected)


def compiled() -> str:
    """Returns the error of a step that XLA is to compile."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=True)
    try:
        model.fit(mine(X), mine(Y), HALF, 1, 0)
    except Exception as error:  # Keras 2 wraps it
        return str(error)
    return "no error"


def unlike() -> str:
    """Returns the error of ranks that call unlike collectives."""
    try:
        hvd.allreduce(tf.constant([1.0])) if RANK else hvd.broadcast(tf.constant([1.0]), 0)
    except CollectiveError as error:
        return str(error)
    return "no error"


found: dict[str, Any] = {"differences": {}, "losses": []}
for make in (
    lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
):
    plain, losses = alone(make)
    model, own_losses = fitted(hvd_keras.DistributedOptimizer(make()))
    name = type(make()).__name__
    found["losses"].append([losses, own_losses])
    found["differences"][name] = difference(plain, model)
    found["differences"][f"{name} loop"] = difference(plain, looped(make()))
passes = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
)
two_passes, _ = fitted(passes, HALF // 2)
plain, _ = alone(lambda: keras.optimizers.SGD(0.1))
found["differences"]["passes"] = difference(plain, two_passes)
path = pathlib.Path(sys.argv[1]) / f"model-{RANK}.keras"
two_passes.save(path)
assert type(keras.models.load_model(path).optimizer) is keras.optimizers.SGD
loaded = hvd_keras.load_model(path)
assert type(loaded.optimizer) is not keras.optimizers.SGD
collectives()
gradients()
begins_again()
overflows()
found["unequal"] = unequal()
found["compiled"] = compiled()
found["unlike"] = unlike()
assert hvd.join() in (0, 1)
print(json.dumps(found))
