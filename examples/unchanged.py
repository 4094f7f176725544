"""A plain Keras program that does not know nanotf; `nanotf run` gives its `fit` two workers.

    nanotf run -n 2 examples/unchanged.py [digits]
    nanotf run -n auto examples/unchanged.py [digits]

Downloads 30 MB the first time; "digits" needs no network.
"""

from __future__ import annotations

import sys

import images
import tensorflow as tf

tf.keras.utils.set_random_seed(0)
(x_train, y_train), (x_test, y_test) = images.load(*sys.argv[1:])

inputs = tf.keras.Input(x_train.shape[1:])
hidden = tf.keras.layers.Flatten()(inputs)
hidden = tf.keras.layers.Dense(256, activation="relu")(hidden)
outputs = tf.keras.layers.Dense(10, activation="softmax")(hidden)
model = tf.keras.Model(inputs, outputs)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=64, epochs=4, verbose=2)
print("accuracy on the test images:", model.evaluate(x_test, y_test, verbose=0)[1])
