"""Binary weights: quantized variables, by Adam and by Bop."""

import json

import larq
import numpy as np
import tensorflow as tf

rows = np.random.default_rng(0)
x, y = rows.normal(size=(50, 6)).astype("float32"), rows.integers(0, 3, 50)


def fit(optimizer):
    tf.keras.utils.set_random_seed(1)
    binary = {"kernel_quantizer": "ste_sign", "kernel_constraint": "weight_clip"}
    model = tf.keras.Sequential(
        [
            larq.layers.QuantDense(8, input_shape=(6,), **binary),
            tf.keras.layers.BatchNormalization(),
            larq.layers.QuantDense(3, input_quantizer="ste_sign", **binary),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model.fit(x, y, batch_size=9, epochs=3, verbose=0).history


adam = tf.keras.optimizers.legacy.Adam
bop = (larq.optimizers.Bop.is_binary_variable, larq.optimizers.Bop(threshold=1e-6))
found = [fit(adam(0.01)), fit(larq.optimizers.CaseOptimizer(bop, default_optimizer=adam(0.01)))]
print(json.dumps(found))
