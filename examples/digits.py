"""A small CNN on scikit-learn's handwritten digits: one process, then two workers, timed.

    make demo
    python examples/digits.py [--processes 2] [--epochs 12]

Needs no download: the 1,797 images come with scikit-learn.
"""

from __future__ import annotations

import argparse
import math
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


class Clock(tf.keras.callbacks.Callback):
    """Notes when training begins, and when each epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.perf_counter()
        self.ends: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.ends.append(time.perf_counter())

    @property
    def each(self) -> float:
        """Seconds of an epoch after the first."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    @property
    def once(self) -> float:
        """Seconds that do not depend on the number of epochs: the start, the first trace."""
        return self.ends[0] - self.began - self.each


parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--epochs", type=int, default=12, help="at least 2")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.25, random_state=0)

for placement in nanotf.plan(options.processes).placements:
    print(f"worker {placement.rank} on cores {', '.join(map(str, placement.cores))}")

clocks, accuracies = {}, {}
for number in (1, options.processes):
    name = "one process" if number == 1 else f"{number} worker processes"
    print(f"\n{name}:")
    model = make_model()
    clocks[name] = clock = Clock()
    # The first call with workers starts them, which import TensorFlow. Later calls reuse them.
    model.fit(
        x_train,
        y_train,
        batch_size=64,
        epochs=options.epochs,
        verbose=2,
        callbacks=[clock],
        num_processes=number,
    )
    _, accuracies[name] = model.evaluate(x_test, y_test, verbose=0)

print(f"\n{'':>24}  whole time  before epoch 1  each epoch  accuracy on {len(x_test)} other digits")
for name, clock in clocks.items():
    whole = clock.ends[-1] - clock.began
    print(
        f"{name:>24}  {whole:8.2f} s  {clock.once:12.2f} s  {clock.each:8.3f} s"
        f"  {accuracies[name]:.2%}"
    )
one, several = clocks.values()
saved = one.each - several.each
if saved > 0:
    epochs = max(1, math.floor((several.once - one.once) / saved) + 1)
    print(f"Workers, their start included, pay from {epochs} epochs.")
else:
    print("Workers do not pay: an epoch takes no less time with them.")
if accuracies[name] <= 0.95:
    raise SystemExit(f"The accuracy must exceed 95 %. Received: {accuracies[name]:.2%}.")
