"""Fashion-MNIST: the well-known Keras program, plus one argument.

    python examples/fashion_mnist.py [digits]

Downloads 30 MB the first time; "digits" needs no network.
"""

from __future__ import annotations

import sys

import images
import tensorflow as tf

from nanotf.keras import Sequential  # was: from tensorflow.keras import Sequential

tf.keras.utils.set_random_seed(0)
(x_train, y_train), (x_test, y_test) = images.load(*sys.argv[1:])

model = Sequential(
    [
        tf.keras.layers.Input(x_train.shape[1:]),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Conv2D(64, 3, activation="relu", padding="same"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x_train,
    y_train,
    batch_size=128,
    epochs=3,
    validation_split=0.1,
    callbacks=[tf.keras.callbacks.EarlyStopping("val_accuracy", patience=1)],
    num_processes=2,  # the only new argument
)
print("accuracy on the test images:", model.evaluate(x_test, y_test, verbose=0)[1])
