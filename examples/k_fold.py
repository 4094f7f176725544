"""Cross-validates a small network on handwritten digits: one fold on each worker at a time.

    python examples/k_fold.py [--folds 5] [--epochs 12]

Needs no download: the 1,797 images come with scikit-learn.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

import nanotf

layers = tf.keras.layers


def run_fold(fold: tuple[Any, Any], x: Any, y: Any, epochs: int) -> float:
    """Trains on one part of the data; returns the accuracy on the other."""
    train, test = fold
    model = tf.keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x[train], y[train], epochs=epochs, verbose=0)
    return float(model.evaluate(x[test], y[test], verbose=0)[1])


parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--folds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=12)
options = parser.parse_args()

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
folds = StratifiedKFold(options.folds, shuffle=True, random_state=0).split(x, y)

# All workers map the same `x` and `y`. A fold is the indices of its two parts.
shared = {"x": x, "y": y, "epochs": options.epochs}
accuracies = nanotf.map(run_fold, folds, shared=shared, seed=0)
print(", ".join(f"{accuracy:.3f}" for accuracy in accuracies))
print(f"accuracy of {options.folds} folds: {np.mean(accuracies):.3f}")
