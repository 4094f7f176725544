"""A temporal convolutional network."""

import json

import numpy as np
import tensorflow as tf
from tcn import TCN

tf.keras.utils.set_random_seed(1)
tf.keras.backend.set_floatx("float64")
rows = np.random.default_rng(0)
x, y = rows.normal(size=(50, 12, 3)), rows.normal(size=(50, 1))
model = tf.keras.Sequential(
    [
        tf.keras.Input((12, 3)),
        TCN(4, kernel_size=2, dilations=(1, 2), use_batch_norm=True),
        tf.keras.layers.Dense(1),
    ]
)
model.compile(tf.keras.optimizers.Adam(0.01), "mse")
history = model.fit(x, y, batch_size=9, epochs=3, verbose=0).history
print(json.dumps([history, model.predict(x[:7], verbose=0).tolist()]))
