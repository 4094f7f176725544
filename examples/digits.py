"""A small CNN on scikit-learn's handwritten digits: one process, then two workers.

    make demo
    python examples/digits.py [--processes 2] [--epochs 12]

Needs no download: the 1,797 images come with scikit-learn.
"""

from __future__ import annotations

import argparse
import time

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nanotf
from nanotf.keras import Sequential

layers = tf.keras.layers


def make_model() -> Sequential:
    """Returns the model, with the same initial weights every time."""
    tf.keras.utils.set_random_seed(0)
    model = Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--epochs", type=int, default=12)
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.25, random_state=0)

for placement in nanotf.plan(options.processes).placements:
    print(f"worker {placement.rank} on cores {', '.join(map(str, placement.cores))}")

print("\nOne process:")
single = make_model()
begin = time.perf_counter()
single.fit(x_train, y_train, batch_size=64, epochs=options.epochs, verbose=2)
single_seconds = time.perf_counter() - begin

print(f"\n{options.processes} worker processes:")
# The first call starts the workers, which import TensorFlow. Later calls reuse them.
begin = time.perf_counter()
make_model().fit(x_train[:64], y_train[:64], verbose=0, num_processes=options.processes)
start_seconds = time.perf_counter() - begin

model = make_model()
begin = time.perf_counter()
model.fit(x_train, y_train, batch_size=64, epochs=options.epochs, num_processes=options.processes)
parallel_seconds = time.perf_counter() - begin

_, single_accuracy = single.evaluate(x_test, y_test, verbose=0)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"\n{'':>24}  wall time  accuracy on {len(x_test)} digits that were held out")
print(f"{'one process':>24}  {single_seconds:7.2f} s  {single_accuracy:.2%}")
print(f"{f'{options.processes} worker processes':>24}  {parallel_seconds:7.2f} s  {accuracy:.2%}")
print(f"{'starting them, once':>24}  {start_seconds:7.2f} s")
if accuracy <= 0.95:
    raise SystemExit(f"The accuracy must exceed 95 %. Received: {accuracy:.2%}.")
