"""Variational layers, and an output that is a distribution."""

import json

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
x = rows.normal(size=(54, 3)).astype("float32")
y = (x[:, :1] * 2.0 + rows.normal(size=(54, 1)) * 0.1).astype("float32")


def spread(values):
    return tfp.distributions.Normal(values[..., :1], 0.1 + tf.nn.softplus(values[..., 1:]))


model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(8, activation="tanh", input_shape=(3,)),
        tf.keras.layers.Dense(2),
        tfp.layers.DistributionLambda(spread),
    ]
)
model.compile(tf.keras.optimizers.Adam(0.02), lambda y, of: -of.log_prob(y))
first = model.fit(x, y, batch_size=10, epochs=3, verbose=0).history
variational = tf.keras.Sequential(
    [
        tfp.layers.DenseReparameterization(4, activation="tanh", input_shape=(3,)),
        tfp.layers.DenseReparameterization(1),
    ]
)
variational.compile(tf.keras.optimizers.Adam(0.02), "mse")
second = variational.fit(x, y, batch_size=10, epochs=3, verbose=0).history
print(json.dumps([first, second]))
