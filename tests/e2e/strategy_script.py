"""A script for one process and the devices that it has; `test_ranks.py` runs it in ranks, too.

Prints what it has computed as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

BATCH = 16
_exists = os.path.exists


def _exists_late(path: Any) -> bool:
    """Answers late: all ranks ask before one of them makes what they ask for."""
    answer = _exists(path)
    if str(path) in ("saved", "backup"):
        time.sleep(0.2)
    return answer


os.path.exists = _exists_late
keras = tf.keras
keras.backend.set_floatx("float64")
os.chdir(sys.argv[1])
strategy = getattr(tf.distribute, sys.argv[2])(*sys.argv[3:])
x = np.random.default_rng(0).normal(size=(64, 8))
y = x.sum(axis=1, keepdims=True)
rows = tf.data.Dataset.from_tensor_slices((x, y))
keras.utils.set_random_seed(3)
with strategy.scope():
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(1)])
    simple = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    simple.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), "mse", metrics=["mae"])
    optimizer = keras.optimizers.SGD(0.1)
    checkpoint = tf.train.Checkpoint(model=simple, optimizer=optimizer)

saving = keras.callbacks.ModelCheckpoint("saved/epoch-{epoch}.weights.h5", save_weights_only=True)
log = keras.callbacks.CSVLogger("log.csv", append=True)
data = rows.shuffle(64).batch(BATCH)
history = simple.fit(data, epochs=2, callbacks=[saving, log], verbose=0).history
found: dict[str, Any] = {
    "history": history,
    "logged": [line.split(",")[0] for line in pathlib.Path("log.csv").read_text().splitlines()],
    "evaluated": simple.evaluate(x, y, verbose=0),
    "predicted": simple.predict(x[:63], verbose=0).ravel().tolist(),
}


class _Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise StopIteration


# The losses at a batch's end are those of a rank's own rows, and differ in their order.
best = {"monitor": "loss", "mode": "min", "save_best_only": True, "save_freq": 3}


class _Vector(keras.callbacks.Callback):
    """Logs what a callback before others may: an array, and a number that is none."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        logs.update(errors=np.arange(3.0), unknown=math.nan, parts={"a": 1.0})


keeping = keras.callbacks.ModelCheckpoint(
    "best/{loss:.5f}.weights.h5", save_weights_only=True, **best
)
weighed = rows.map(lambda a, b: (a, b, tf.abs(b[0]) ** 3)).batch(BATCH)
simple.fit(weighed, epochs=4, callbacks=[_Vector(), keeping], verbose=0)
assert list(pathlib.Path("best").iterdir())
# From the second, Keras copies a file before it reads it.
places = ["backup", f"file://{pathlib.Path.cwd()}/copied"][: 2 if hasattr(keras, "ops") else 1]
for place in places:
    backup = keras.callbacks.BackupAndRestore(place)
    with contextlib.suppress(StopIteration):
        simple.fit(data, epochs=3, callbacks=[backup, _Stop()], verbose=0)
    assert list(pathlib.Path(place.rpartition("/")[2]).rglob("*"))
    resumed = simple.fit(data, epochs=3, callbacks=[backup], verbose=0)
    found.setdefault("resumed", []).append(resumed.epoch)


def step(inputs: Any) -> Any:
    a, b = inputs
    with tf.GradientTape() as tape:
        errors = tf.reduce_mean((b - simple(a, training=True)) ** 2, axis=1)
        loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH)
    grads = tape.gradient(loss, simple.trainable_variables)
    optimizer.apply_gradients(zip(grads, simple.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_step(inputs: Any) -> Any:
    losses = strategy.run(step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


divided = strategy.experimental_distribute_dataset(rows.batch(BATCH))
found["loop"] = [float(distributed_step(batch)) for batch in divided]


def of_pipeline(context: Any) -> Any:
    own = BATCH // context.num_replicas_in_sync
    numbers = tf.data.Dataset.range(BATCH).batch(own)
    return numbers.shard(context.num_input_pipelines, context.input_pipeline_id)


numbers = next(iter(strategy.distribute_datasets_from_function(of_pipeline)))
found["gathered"] = strategy.gather(numbers, axis=0).numpy().tolist()
manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=1)
for _ in range(2):
    path = manager.save()
model(x)  # its moving statistics are summed when they are saved
model.save("model.keras")
assert pathlib.Path(path).name == "ckpt-2"
assert manager.checkpoints == [manager.latest_checkpoint] == [path]  # in each rank
before = simple.get_weights()
simple.set_weights([0 * weight for weight in before])
checkpoint.restore(tf.train.latest_checkpoint("checkpoints"))
np.testing.assert_array_equal(before[0], simple.get_weights()[0])
paths = [path for path in pathlib.Path().rglob("*") if path.is_file()]
found["files"] = sorted(str(path) for path in paths if path.parent.name != "best")
found["replicas"] = strategy.num_replicas_in_sync
print(json.dumps(found))
