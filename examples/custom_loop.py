"""A custom training loop on two processes, by adding two lines.

python examples/custom_loop.py [digits]
"""

from __future__ import annotations

import sys
import time

import images
import tensorflow as tf

from nanotf.keras import nano, nano_multiprocessing

tf.keras.utils.set_random_seed(0)
(x_train, y_train), (x_test, y_test) = images.load(*sys.argv[1:])
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(1000).batch(64)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input(x_train.shape[1:]),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam()
accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


@nano_multiprocessing  # remove this line to run on one process
@tf.function
def train_step(inputs, model, loss_object, optimizer):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    accuracy.update_state(labels, predictions)
    return loss


@nano(num_processes=2)  # remove this line to run on one process
def train_whole_data(model, dataset, loss_object, optimizer, train_step, epochs):
    for epoch in range(epochs):
        accuracy.reset_state()
        began = time.perf_counter()
        for inputs in dataset:
            loss = train_step(inputs, model, loss_object, optimizer)
        seconds = time.perf_counter() - began
        print(
            f"epoch {epoch}: loss {float(loss):.3f}, "
            f"accuracy {float(accuracy.result()):.3f}, {seconds:.2f} s"
        )


train_whole_data(model, dataset, loss_object, optimizer, train_step, epochs=3)
predicted = model(x_test).numpy().argmax(axis=1)
print(f"accuracy on the test images: {(predicted == y_test).mean():.3f}")
