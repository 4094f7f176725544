"""TensorFlow's own pattern for custom training with tf.distribute, inside `@nano`.

python examples/custom_loop_strategy.py [digits]

The code is the guide's (https://www.tensorflow.org/tutorials/distribute/custom_training); the
strategy comes from `nanotf.get_strategy()`.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import images
import tensorflow as tf

import nanotf
from nanotf.keras import nano

EPOCHS = 3
GLOBAL_BATCH_SIZE = 64


def create_model(shape):
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu", kernel_regularizer="l2"),
            tf.keras.layers.Dense(10),
        ]
    )


@nano(num_processes=2)
def train(train_data, test_data, checkpoint_directory):
    strategy = nanotf.get_strategy()
    train_images, train_labels = train_data
    train_dataset = (
        tf.data.Dataset.from_tensor_slices(train_data)
        .shuffle(len(train_labels), seed=1)
        .batch(GLOBAL_BATCH_SIZE)
    )
    test_dataset = tf.data.Dataset.from_tensor_slices(test_data).batch(GLOBAL_BATCH_SIZE)
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

    with strategy.scope():
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        test_loss = tf.keras.metrics.Mean(name="test_loss")
        train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = create_model(train_images.shape[1:])
        optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        images, labels = inputs
        predictions = model(images, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @tf.function
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    for epoch in range(EPOCHS):
        total_loss = 0.0
        num_batches = 0
        for x in train_dist_dataset:
            total_loss += float(distributed_train_step(x))
            num_batches += 1
        for x in test_dist_dataset:
            distributed_test_step(x)
        if nanotf.is_chief():
            path = checkpoint.write(checkpoint_directory + "/checkpoint")
        print(
            f"epoch {epoch}: loss {total_loss / num_batches:.3f}, "
            f"accuracy {float(train_accuracy.result()):.3f}, "
            f"test loss {float(test_loss.result()):.3f}, "
            f"test accuracy {float(test_accuracy.result()):.3f}"
        )
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()
    return path if nanotf.is_chief() else None


with tempfile.TemporaryDirectory() as directory:
    data, test = images.load(*sys.argv[1:])
    path = train(data, test, directory)

    # Restored without a strategy.
    restored = create_model(data[0].shape[1:])
    tf.train.Checkpoint(model=restored).read(path).expect_partial()
    predicted = restored(test[0]).numpy().argmax(axis=1)
    print(f"restored from {pathlib.Path(path).name}: {(predicted == test[1]).mean():.3f}")
