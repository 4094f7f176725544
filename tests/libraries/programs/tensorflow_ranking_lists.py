"""Lists of documents are ranked: a loss over each list, with gaps, and its metric."""

import json

import numpy as np
import tensorflow as tf
import tensorflow_ranking as tfr

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
x = rows.normal(size=(40, 5, 3)).astype("float32")
y = rows.integers(-1, 4, (40, 5)).astype("float32")
model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(8, activation="tanh", input_shape=(5, 3)),
        tf.keras.layers.Dense(1),
        tf.keras.layers.Reshape((5,)),
    ]
)
model.compile(
    tf.keras.optimizers.Adam(0.01),
    tfr.keras.losses.ApproxNDCGLoss(),
    metrics=[tfr.keras.metrics.NDCGMetric(topn=3), tfr.keras.metrics.MRRMetric()],
)
history = model.fit(x, y, batch_size=9, epochs=3, verbose=0).history
print(json.dumps([history, model.evaluate(x, y, verbose=0)]))
