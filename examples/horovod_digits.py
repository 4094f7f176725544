"""Trains with Horovod's API, unchanged, on nanotf's collectives.

    nanotf run --ranks -n 2 examples/horovod_digits.py

Each rank trains on its own rows; gradients are averaged. Without `nanotf run` it needs Horovod.
"""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
held_out = x[-300:], y[-300:]
# The same number of rows on each rank: all take the same number of steps.
rows = (len(x) - 300) // hvd.size()
mine = slice(hvd.rank() * rows, (hvd.rank() + 1) * rows)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((64,)),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size()))
model.compile(optimizer, loss, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.001 * hvd.size(), warmup_epochs=2),
]
verbose = 2 if hvd.rank() == 0 else 0
model.fit(x[mine], y[mine], batch_size=32, epochs=8, callbacks=callbacks, verbose=verbose)
if hvd.rank() == 0:
    accuracy = model.evaluate(*held_out, verbose=0)[1]
    print(f"{hvd.size()} ranks: accuracy {accuracy:.3f}")
