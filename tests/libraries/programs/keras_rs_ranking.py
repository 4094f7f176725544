"""A deep and cross network with embeddings, and a retrieval by brute force."""

import json

import keras_rs
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
tf.keras.backend.set_floatx("float64")
rows = np.random.default_rng(0)
users, items = rows.integers(0, 9, 50), rows.integers(0, 12, 50)
ratings = rows.normal(size=(50, 1))
given = [tf.keras.Input((), dtype="int32", name=name) for name in ("user", "item")]
table = tf.keras.layers.Embedding(12, 4)
embedded = tf.keras.layers.Concatenate()(
    [tf.keras.layers.Embedding(9, 4)(given[0]), table(given[1])]
)
crossed = keras_rs.layers.FeatureCross()(embedded, embedded)
model = tf.keras.Model(given, tf.keras.layers.Dense(1)(crossed))
model.compile("adam", "mse", metrics=["mae"])
history = model.fit([users, items], ratings, batch_size=9, epochs=3, verbose=0).history
nearest = keras_rs.layers.BruteForceRetrieval(
    candidate_embeddings=table.embeddings, k=3, return_scores=True
)
scores, _ = nearest(table(np.arange(4)))
print(json.dumps([history, np.asarray(scores).tolist()]))
