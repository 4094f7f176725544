"""A search of hyperparameters; each trial calls `fit`."""

import json
import tempfile

import keras_tuner
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
tf.keras.backend.set_floatx("float64")
rows = np.random.default_rng(0)
x, y = rows.normal(size=(60, 5)), rows.normal(size=(60, 1))


def build(hp):
    tf.keras.utils.set_random_seed(2)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((5,)),
            tf.keras.layers.Dense(hp.Choice("units", [4, 8]), activation="tanh"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(hp.Choice("rate", [0.01, 0.1])), "mse")
    return model


with tempfile.TemporaryDirectory() as folder:
    tuner = keras_tuner.GridSearch(build, objective="val_loss", directory=folder)
    tuner.search(x, y, validation_split=0.2, epochs=2, batch_size=7, verbose=0)
    trials = tuner.oracle.get_best_trials(4)
    found = [[trial.hyperparameters.values, trial.score] for trial in trials]
print(json.dumps(found))
