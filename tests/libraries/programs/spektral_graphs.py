"""Graphs of unlike sizes in padded batches."""

import json

import numpy as np
import tensorflow as tf
from spektral.data import BatchLoader, Dataset, Graph
from spektral.layers import GCSConv, GlobalSumPool

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)


class Graphs(Dataset):
    def read(self):
        def graph(nodes):
            edges = rows.integers(0, 2, (nodes, nodes)).astype("float32")
            x = rows.normal(size=(nodes, 3)).astype("float32")
            return Graph(x=x, a=np.maximum(edges, edges.T), y=rows.normal(size=1))

        return [graph(nodes) for nodes in rows.integers(3, 7, 40)]


class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.convolve, self.pool = GCSConv(8, activation="tanh"), GlobalSumPool()
        self.out = tf.keras.layers.Dense(1)

    def call(self, inputs):
        x, a = inputs
        return self.out(self.pool(self.convolve([x, a])))


np.random.seed(2)
loader = BatchLoader(Graphs(), batch_size=10, epochs=3)
model = Net()
model.compile(tf.keras.optimizers.Adam(0.01), "mse")
history = model.fit(
    loader.load(), steps_per_epoch=loader.steps_per_epoch, epochs=3, verbose=0
).history
print(json.dumps(history))
