"""Searches the hyperparameters of a small model on scikit-learn's handwritten digits.

    python examples/search.py [--trials 12] [--parallel auto] [--storage sqlite:///search.db]

Needs Optuna: pip install 'nanotf[search]'. With matplotlib it draws the study to search.png. With
`--storage`, the same command continues the study.
"""

from __future__ import annotations

import argparse
import pathlib

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nanotf

layers = tf.keras.layers


def build(units: int, dropout: float, rate: float, activation: str) -> tf.keras.Model:
    """Returns a model for a trial's parameters."""
    model = tf.keras.Sequential(
        [
            layers.Dense(units, activation),
            layers.Dropout(dropout),
            layers.Dense(10, "softmax"),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(rate)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


SPACE = {
    "units": (16, 256, "log"),
    "dropout": (0.0, 0.5),
    "rate": (1e-4, 1e-1, "log"),
    "activation": ["relu", "tanh"],
}

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--trials", type=int, default=12)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--parallel", default="auto", help="trials at a time (default: measured)")
parser.add_argument("--storage", help="a database, such as sqlite:///search.db")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.25, random_state=0)

result = nanotf.search(
    build,
    SPACE,
    (x_train, y_train),
    "val_accuracy",
    options.trials,
    options.parallel if options.parallel == "auto" else int(options.parallel),
    direction="maximize",
    storage=options.storage,
    study_name="digits" if options.storage else None,
    seed=0,
    epochs=options.epochs,
    batch_size=32,
    validation_split=0.2,
)
print(result)

try:
    from matplotlib import pyplot
    from optuna.visualization.matplotlib import plot_optimization_history
except ImportError as error:
    print(f"No plot: {error}. pip install 'nanotf[plot]'")
else:
    plot_optimization_history(result.study)
    pyplot.savefig("search.png", bbox_inches="tight")
    print(f"The study's history is drawn in {pathlib.Path('search.png').resolve()}")

_, accuracy = result.best_model.evaluate(x_test, y_test, verbose=0)
print(f"accuracy of the best model on the test images: {accuracy:.4f}")
