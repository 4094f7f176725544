"""Keras models in scikit-learn: a seed, which sets TF_DETERMINISTIC_OPS, and several jobs."""

import json

import numpy as np
import tensorflow as tf
from scikeras.wrappers import KerasRegressor
from sklearn.model_selection import cross_val_score

rows = np.random.default_rng(0)
x = rows.normal(size=(60, 5)).astype("float32")
y = (x[:, 0] * 2.0 + 1.0).astype("float32")


def build(units=4):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((5,)),
            tf.keras.layers.Dense(units, activation="tanh"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(0.05), "mse")
    return model


def regressor():
    return KerasRegressor(build, epochs=3, batch_size=8, verbose=0, random_state=1)


alone = regressor().fit(x, y)
scores = cross_val_score(regressor(), x, y, cv=3)
print(json.dumps([alone.history_, alone.predict(x[:5]).tolist(), scores.tolist()]))
