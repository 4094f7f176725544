"""Trains a small network, then finds the engine that computes it fastest on this machine.

    python examples/optimize_model.py [--epochs 3] [--engines tensorflow,frozen,xla]

Needs no download: the 1,797 images come with scikit-learn. More engines are tried if they are
installed: pip install 'nanotf[openvino,onnxruntime,litert]'.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import nanotf

layers = tf.keras.layers

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--engines", default="auto", help="names, separated by commas")
options = parser.parse_args()

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
model = tf.keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=options.epochs, verbose=0)

engines = options.engines if options.engines == "auto" else options.engines.split(",")
result = nanotf.inference.optimize(model, x[:200], engines=engines)
print(result)

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "program"
    result.save(path)
    program = nanotf.inference.load(path)
    found = program.predict(x, batch_size=32)
print(f"accuracy {np.mean(found.argmax(axis=1) == y):.3f} with the engine {program.engine}")
print(f"largest difference from Keras {np.abs(found - model.predict(x, verbose=0)).max():.1e}")
