"""Retrieval with a metric over all candidates, and ranking."""

import json

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
users, films = rows.integers(0, 20, 96).astype(str), rows.integers(0, 30, 96).astype(str)
ratings = rows.integers(1, 6, 96).astype("float32")
data = tf.data.Dataset.from_tensor_slices({"user": users, "film": films, "rating": ratings})
candidates = tf.data.Dataset.from_tensor_slices(np.arange(30).astype(str))


def embedding(names):
    look_up = tf.keras.layers.StringLookup(vocabulary=sorted(set(names)), mask_token=None)
    return tf.keras.Sequential([look_up, tf.keras.layers.Embedding(len(set(names)) + 1, 8)])


class Retrieval(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.users, self.films = embedding(users), embedding(np.arange(30).astype(str))
        known = candidates.batch(16).map(self.films)
        self.task = tfrs.tasks.Retrieval(metrics=tfrs.metrics.FactorizedTopK(known))

    def compute_loss(self, batch, training=False):
        return self.task(self.users(batch["user"]), self.films(batch["film"]))


class Ranking(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.users, self.films = embedding(users), embedding(films)
        self.rate = tf.keras.layers.Dense(1)
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.MeanSquaredError(), metrics=[tf.keras.metrics.MeanAbsoluteError()]
        )

    def compute_loss(self, batch, training=False):
        both = [self.users(batch["user"]), self.films(batch["film"])]
        return self.task(labels=batch["rating"], predictions=self.rate(tf.concat(both, 1)))


histories = []
for kind in (Retrieval, Ranking):
    model = kind()
    model.compile(tf.keras.optimizers.legacy.Adagrad(0.1))
    histories.append(model.fit(data.batch(20), epochs=3, verbose=0).history)
print(json.dumps(histories))
