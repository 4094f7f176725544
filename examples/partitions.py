"""Trains a Keras model in two parts, each in a process of its own, with `fit`.

    nanotf run --smp -n 2 examples/partitions.py
    nanotf run --smp -n 2 examples/partitions.py --pipeline simple --picture pipeline.png

All processes run this script. Each holds one part's weights and slots. The report at the end shows
when each computed and waited, and its memory.
"""

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits

from nanotf import smp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--pipeline", choices=("interleaved", "simple"), default="interleaved")
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--units", type=int, default=512, help="of each hidden layer, default 512")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--picture", help="path of a picture of the last step; needs matplotlib")
options = parser.parse_args()

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
tf.keras.utils.set_random_seed(1)
layers = [tf.keras.layers.Dense(options.units, activation="relu") for _ in range(4)]
model = tf.keras.Sequential([tf.keras.Input((64,)), *layers, tf.keras.layers.Dense(10)])

model = smp.DistributedModel.from_keras(
    model, partitions=2, microbatches=options.microbatches, pipeline=options.pipeline
)
model.compile(
    tf.keras.optimizers.Adam(0.001),
    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x[:1500], y[:1500], batch_size=100, epochs=options.epochs, verbose=2)
_, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)

report = smp.last_report()
if smp.rank() == 0:
    print(report)
    if options.picture:
        report.plot(options.picture)
    print(f"accuracy on other digits: {accuracy:.3f}")
