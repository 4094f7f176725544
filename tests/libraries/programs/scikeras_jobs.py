"""Keras models in scikit-learn, trained in joblib's processes: these are not nanotf's."""

import json

import numpy as np
import tensorflow as tf
from scikeras.wrappers import KerasRegressor
from sklearn.model_selection import cross_val_score

rows = np.random.default_rng(0)
x = rows.normal(size=(60, 5)).astype("float32")
y = (x[:, 0] * 2.0 + 1.0).astype("float32")


def build():

    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.05), "mse")
    return model


regressor = KerasRegressor(build, epochs=3, batch_size=8, verbose=0, random_state=1)
print(json.dumps(cross_val_score(regressor, x, y, cv=2, n_jobs=2).tolist()))
