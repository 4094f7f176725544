"""Pruning, quantization-aware training and clustering."""

import json

import numpy as np
import tensorflow as tf
import tensorflow_model_optimization as tfmot

rows = np.random.default_rng(0)
x, y = rows.normal(size=(60, 6)).astype("float32"), rows.integers(0, 3, 60)


def dense():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, activation="relu", input_shape=(6,)),
            tf.keras.layers.Dense(3),
        ]
    )


def fit(model, **options):
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model.fit(x, y, batch_size=10, epochs=3, verbose=0, **options).history


pruning = tfmot.sparsity.keras
clustering = tfmot.clustering.keras
found = [
    fit(
        pruning.prune_low_magnitude(dense(), pruning.PolynomialDecay(0.0, 0.5, 2, 12, frequency=2)),
        callbacks=[pruning.UpdatePruningStep()],
    ),
    fit(tfmot.quantization.keras.quantize_model(dense())),
    fit(
        clustering.cluster_weights(
            dense(),
            number_of_clusters=4,
            cluster_centroids_init=clustering.CentroidInitialization.LINEAR,
        )
    ),
]
print(json.dumps(found))
