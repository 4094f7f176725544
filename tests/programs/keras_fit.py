"""Keras's own compile and fit, called inside the loop function."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, images, labels, mlp, rows, targets, tokens
from tensorflow.keras import layers


@program
def compile_and_fit(nano: Any, step: Any) -> Any:
    """fit with a validation split and metrics by name, then evaluate (tutorials/keras)."""

    @nano
    def train(x, y):
        model = mlp(4, 8, 3, activation="relu")
        model.compile(
            optimizer="adam",
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        history = model.fit(x, y, epochs=2, batch_size=16, validation_split=0.25, verbose=0)
        evaluated = model.evaluate(x, y, verbose=0)
        return history.history, evaluated, model.get_weights()

    return train(rows(44), labels(44))


@program
def fit_captured_model(nano: Any, step: Any) -> Any:
    """Fits a model inside that was compiled outside, on a dataset, and then predicts."""
    model = mlp(4, 8, 1)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")

    @nano
    def train(dataset, epochs):
        return model.fit(dataset, epochs=epochs, verbose=0).history["loss"]

    x = rows(37)
    losses = train(batches(x, targets(x)), 2)
    return losses, model.predict(x[:5], verbose=0), model.get_weights()


class CustomModel(tf.keras.Model):
    """A model with its own train_step and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 8, 1)
        self.loss_tracker = tf.keras.metrics.Mean(name="loss")
        self.mae_metric = tf.keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x: Any, training: Any = None) -> Any:
        return self.net(x, training=training)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - y_pred))
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(tf.reduce_mean(tf.square(y - y_pred)))
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker, self.mae_metric]


@program
def fit_with_train_step(nano: Any, step: Any) -> Any:
    """Runs the model's own train_step and test_step by fit (guide on customizing fit)."""

    @nano
    def train(x, y):
        model = CustomModel()
        model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))
        history = model.fit(
            x[:32], y[:32], epochs=2, batch_size=12, validation_data=(x[32:], y[32:]), verbose=0
        )
        return history.history, model.net.get_weights()

    x = rows(45)
    return train(x, targets(x))


@program
def train_step_called_by_loop(nano: Any, step: Any) -> Any:
    """Calls the model's own train_step and test_step from a loop instead of fit."""
    model = CustomModel()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2))

    @step
    @tf.function
    def train_step(x, y):
        return model.train_step((x, y))

    @step
    @tf.function
    def test_step(x, y):
        return model.test_step((x, y))

    @nano
    def train(train_dataset, val_dataset):
        logs = []
        for _epoch in range(2):
            for metric in model.metrics:
                metric.reset_state()
            for x, y in train_dataset:
                last = train_step(x, y)
            logs.append({name: float(value) for name, value in last.items()})
            for metric in model.metrics:
                metric.reset_state()
            for x, y in val_dataset:
                last = test_step(x, y)
            logs.append({f"val_{name}": float(value) for name, value in last.items()})
        return logs

    x, other = rows(37), rows(20, seed=5)
    logs = train(batches(x, targets(x)), batches(other, targets(other)))
    return logs, model.net.get_weights()


@program
def compiled_train_step(nano: Any, step: Any) -> Any:
    """Wraps Keras's own train_step of a compiled functional model and calls it in a loop."""
    inputs = tf.keras.Input(shape=(4,))
    hidden = layers.Dense(8, activation="relu", kernel_regularizer="l2")(inputs)
    model = tf.keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(optimizer=tf.keras.optimizers.RMSprop(1e-2), loss="mae")

    @step
    @tf.function
    def train_step(x, y):
        return model.train_step((x, y))["loss"]

    @nano
    def train(x, y):
        losses = []
        for start in range(0, len(x), 13):
            part = slice(start, start + 13)
            losses.append(float(train_step(tf.constant(x[part]), tf.constant(y[part]))))
        return losses

    x = rows(33)
    return train(x, targets(x)), model.get_weights()


class GAN(tf.keras.Model):
    """Two nets and two optimizers under one compile."""

    def __init__(self, discriminator: Any, generator: Any, latent_dim: int) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_loss_tracker = tf.keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = tf.keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile(jit_compile=False)
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self) -> Any:
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, real: Any) -> Any:
        batch_size = tf.shape(real)[0]
        noise = tf.random.normal(shape=(batch_size, self.latent_dim), dtype=real.dtype)
        combined = tf.concat([self.generator(noise), real], axis=0)
        ones = tf.ones((batch_size, 1), real.dtype)
        answers = tf.concat([ones, tf.zeros_like(ones)], axis=0)
        answers += 0.05 * tf.random.uniform(tf.shape(answers), dtype=real.dtype)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(answers, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        grads = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(grads, weights, strict=True))
        noise = tf.random.normal(shape=(batch_size, self.latent_dim), dtype=real.dtype)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros_like(ones), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        grads = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


@program
def gan_by_fit(nano: Any, step: Any) -> Any:
    """Trains a GAN with its own compile and train_step by fit (keras.io, dcgan)."""
    gan = GAN(mlp(4, 8, 1), mlp(3, 8, 4), latent_dim=3)
    gan.compile(
        d_optimizer=tf.keras.optimizers.Adam(learning_rate=1e-3),
        g_optimizer=tf.keras.optimizers.Adam(learning_rate=1e-3),
        loss_fn=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )

    @nano
    def train(dataset):
        return gan.fit(dataset, epochs=2, verbose=0).history

    history = train(batches(rows(40), size=14))
    return history, gan.discriminator.get_weights(), gan.generator.get_weights()


@program
def fit_with_callbacks(nano: Any, step: Any) -> Any:
    """Uses a callback class that fills lists, a schedule by epoch, plateaus, early stopping."""

    class LossHistory(tf.keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batch_losses = []
            self.epochs = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batch_losses.append(float(logs["loss"]))

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1

    @nano
    def train(x, y):
        model = mlp(4, 8, 1)
        model.compile(optimizer=tf.keras.optimizers.SGD(0.2), loss="mse")
        noted = LossHistory()
        history = model.fit(
            batches(x, y),
            epochs=4,
            verbose=0,
            callbacks=[
                noted,
                tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
                tf.keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=0.05),
            ],
        )
        return history.history["loss"], noted.batch_losses, noted.epochs, model.get_weights()

    x = rows(40)
    return train(x, targets(x))


@program
def train_on_batch_loop(nano: Any, step: Any) -> Any:
    """Calls train_on_batch, test_on_batch and predict_on_batch in the user's loop."""
    model = mlp(4, 8, 1)
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-2), loss="mse", metrics=["mae"])

    @nano
    def train(x, y):
        trained, tested = [], []
        for epoch in range(2):
            order = np.random.permutation(len(x))
            for start in range(0, len(x), 15):
                chosen = order[start : start + 15]
                trained.append(model.train_on_batch(x[chosen], y[chosen])[0])
            tested.append((epoch, model.test_on_batch(x[:7], y[:7])[0]))
        return trained, tested, model.predict_on_batch(x[:3])

    x = rows(35)
    return train(x, targets(x)), model.get_weights()


@program
def fit_two_outputs(nano: Any, step: Any) -> Any:
    """Named outputs, a loss for each with weights, sample weights by dataset."""

    @nano
    def train(x, value, group):
        inputs = tf.keras.Input(shape=(4,), name="x")
        hidden = layers.Dense(8, activation="tanh")(inputs)
        outputs = {
            "value": layers.Dense(1, name="value")(hidden),
            "group": layers.Dense(3, activation="softmax", name="group")(hidden),
        }
        model = tf.keras.Model(inputs, outputs)
        model.compile(
            optimizer=tf.keras.optimizers.Adam(1e-2),
            loss={"value": "mse", "group": "sparse_categorical_crossentropy"},
            loss_weights={"value": 1.0, "group": 0.5},
        )
        dataset = batches(x, {"value": value, "group": group})
        history = model.fit(dataset, epochs=2, verbose=0)
        found = model.predict(x[:4], verbose=0)
        return history.history["loss"], found, model.get_weights()

    x = rows(38)
    return train(x, targets(x), labels(38)[:, None])


@program
def fit_then_own_loop(nano: Any, step: Any) -> Any:
    """Fits a model for an epoch, then trains it by a step with another optimizer."""
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(4,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    fine = tf.keras.optimizers.SGD(0.01)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=False) - y))
        grads = tape.gradient(loss, model.trainable_variables)
        fine.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, y):
        model.compile(optimizer=tf.keras.optimizers.Adam(1e-2), loss="mse")
        first = model.fit(x, y, batch_size=14, epochs=1, shuffle=False, verbose=0)
        second = [float(train_step(*batch)) for batch in batches(x, y)]
        return first.history["loss"], second

    x = rows(42)
    found = train(x, targets(x)), model.get_weights()
    return found, model.evaluate(x, targets(x), verbose=0), int(model.optimizer.iterations)


@program
def fit_in_a_search(nano: Any, step: Any) -> Any:
    """Fits a model per setting in a Python loop and keeps the one with the lowest loss."""

    @nano
    def search(x, y):
        results, best = {}, None
        for units in (3, 6):
            model = mlp(4, units, 1)
            model.compile(optimizer=tf.keras.optimizers.SGD(0.05), loss="mse")
            model.fit(x, y, batch_size=20, epochs=1, verbose=0)
            loss = model.evaluate(x, y, verbose=0)
            results[units] = loss
            if best is None or loss < best[0]:
                best = (loss, model.get_weights())
        return results, best

    x = rows(40)
    return search(x, targets(x))


@program
def fit_text_with_weights(nano: Any, step: Any) -> Any:
    """Trains a masked embedding and an LSTM, with class weights and without shuffling."""

    @nano
    def train(x, y):
        model = tf.keras.Sequential(
            [
                tf.keras.Input(shape=(4,), dtype="int64"),
                layers.Embedding(12, 4, mask_zero=True),
                layers.LSTM(4),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(
            optimizer="adam",
            loss="binary_crossentropy",
            weighted_metrics=["mse"],
            jit_compile=False,
        )
        history = model.fit(
            x, y, batch_size=15, epochs=1, class_weight={0: 0.7, 1: 1.8}, verbose=0, shuffle=False
        )
        return history.history, model.get_weights()

    return train(tokens(33, 4), labels(33, 2).astype("float64")[:, None])


@program
def fit_with_augmentation(nano: Any, step: Any) -> Any:
    """Rescales images by a layer; dropout, a custom loss function, a shuffled dataset."""

    def my_loss(y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred) ** 1.5, axis=-1)

    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            layers.Rescaling(2.0, offset=-1.0),
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.Dropout(0.2, seed=3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )

    @nano
    def train(pictures, values):
        model.compile(optimizer=tf.keras.optimizers.Nadam(1e-3), loss=my_loss)
        data = tf.data.Dataset.from_tensor_slices((pictures, values)).shuffle(30, seed=2)
        return model.fit(data.batch(12), epochs=2, verbose=0).history["loss"]

    return train(images(28), rows(28, 1)), model.get_weights()
