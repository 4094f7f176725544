"""A script for SageMaker's script mode: hyperparameters as arguments, folders from SM_* variables.

    python examples/script_mode.py --epochs 3
    nanotf train examples/script_mode.py -n 2 -p epochs=3 --metric 'acc=^accuracy: ([0-9.]+)'

It knows nothing of nanotf. `nanotf train --channel train=DIR` passes a folder with `digits.npz`,
which has `x` and `y`. Without that channel it trains on scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAIN"))
parser.add_argument("--model_dir", help="SageMaker's estimators pass it; unused here")
parser.add_argument("--sm-model-dir", default=os.environ.get("SM_MODEL_DIR"))
options = parser.parse_args()

if options.train:
    with np.load(pathlib.Path(options.train, "digits.npz")) as data:
        x, y = data["x"], data["y"]
else:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)

x = (x / 16).astype("float32")
held_out = len(x) // 4

tf.keras.utils.set_random_seed(0)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((64,)),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x[held_out:], y[held_out:], batch_size=options.batch_size, epochs=options.epochs, verbose=2
)
_, accuracy = model.evaluate(x[:held_out], y[:held_out], verbose=0)
if options.sm_model_dir:
    model.save(pathlib.Path(options.sm_model_dir, "model.keras"))
print(f"accuracy: {accuracy:.3f}")
