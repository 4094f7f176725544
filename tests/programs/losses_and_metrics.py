"""Losses written in many ways, and metrics kept in many ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, mlp, rows, targets


@program
def root_mean_squared_error(nano: Any, step: Any) -> Any:
    """Uses the square root of a mean over the batch as the loss."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    def rmse(y_true, y_pred):
        return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = rmse(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        return [float(train_step(x, y)) for x, y in dataset]

    x = rows(37)
    return train(batches(x, targets(x))), model.get_weights()


@program
def sum_over_batch_size(nano: Any, step: Any) -> Any:
    """Losses without reduction, summed and divided by a constant BATCH_SIZE."""
    BATCH_SIZE = 16
    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.SGD(0.3)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(answers, predictions):
        per_example_loss = loss_object(answers, predictions)
        return tf.reduce_sum(per_example_loss) / BATCH_SIZE

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = compute_loss(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        total_loss, num_batches = 0.0, 0
        for x, y in dataset:
            total_loss += train_step(x, y)
            num_batches += 1
        return total_loss / num_batches

    return train(batches(rows(37), labels(37), size=BATCH_SIZE)), model.get_weights()


@program
def compute_average_loss(nano: Any, step: Any) -> Any:
    """tf.nn.compute_average_loss and scale_regularization_loss (tutorials/distribute)."""
    GLOBAL_BATCH_SIZE = 16
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(4,)),
            tf.keras.layers.Dense(6, "relu", kernel_regularizer=tf.keras.regularizers.l2(1e-2)),
            tf.keras.layers.Dense(3),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(1e-2)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

    def compute_loss(answers, predictions, model_losses):
        per_example_loss = loss_object(answers, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    @step
    @tf.function
    def train_step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = compute_loss(y, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions)
        return loss

    @nano
    def train(dataset):
        losses = [train_step(inputs) for inputs in dataset]
        return losses, accuracy.result()

    return train(batches(rows(38), labels(38), size=GLOBAL_BATCH_SIZE)), model.get_weights()


@program
def class_weights_by_hand(nano: Any, step: Any) -> Any:
    """Weights gathered per label, a weighted mean, and weights from the counts of the batch."""
    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    class_weight = tf.constant([0.5, 1.0, 2.5], tf.float64)

    @step
    @tf.function
    def train_step(x, y):
        weights = tf.gather(class_weight, y)
        frequency = tf.reduce_mean(tf.one_hot(y, 3, dtype=tf.float64), axis=0)
        balance = tf.gather(1.0 / (frequency + 0.1), y)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            weighted = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
            balanced = tf.reduce_mean(losses * balance)
            loss = weighted + 0.1 * balanced
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return weighted, balanced

    @nano
    def train(x, y):
        return [train_step(*batch) for batch in batches(x, y)]

    return train(rows(41), labels(41)), model.get_weights()


@program
def sample_weights(nano: Any, step: Any) -> Any:
    """sample_weight given to a loss object, to a metric with weights, and to a Mean."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    loss_fn = tf.keras.losses.MeanAbsoluteError()
    error = tf.keras.metrics.MeanSquaredError()
    mean = tf.keras.metrics.Mean()

    @step
    @tf.function
    def train_step(x, y, w):
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            loss = loss_fn(y, prediction, sample_weight=w)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        error.update_state(y, prediction, sample_weight=w)
        mean.update_state(prediction[:, 0], sample_weight=w)
        return loss

    @nano
    def train(x, y, w):
        losses = []
        for i in range(0, len(x), 15):
            losses.append(train_step(x[i : i + 15], y[i : i + 15], w[i : i + 15]))
        return losses, error.result(), mean.result()

    x = rows(40)
    w = np.random.default_rng(8).uniform(0, 2, size=40)
    return train(x, targets(x), w), model.get_weights()


@program
def label_smoothing(nano: Any, step: Any) -> Any:
    """Smoothing in a loss object and the same by hand, both in one loss."""
    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.SGD(0.2)
    smooth_fn = tf.keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

    @step
    @tf.function
    def train_step(x, y):
        one_hot = tf.one_hot(y, 3, dtype=x.dtype)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            first = smooth_fn(one_hot, logits)
            smooth = one_hot * (1 - 0.2) + 0.2 / 3
            second = -tf.reduce_mean(tf.reduce_sum(smooth * tf.nn.log_softmax(logits), axis=-1))
            loss = (first + second) / 2
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return first, second

    @nano
    def train(dataset):
        firsts, seconds = [], []
        for x, y in dataset:
            first, second = train_step(x, y)
            firsts.append(first)
            seconds.append(second)
        return tf.stack(firsts), tf.stack(seconds)

    return train(batches(rows(35), labels(35))), model.get_weights()


@program
def uncertainty_weights(nano: Any, step: Any) -> Any:
    """Three tasks with heads in a dictionary and a trainable log variance for each."""
    trunk = mlp(5, 8, last="tanh")
    heads = {"size": mlp(8, 1), "kind": mlp(8, 3), "flag": mlp(8, 1)}
    log_variances = tf.Variable(tf.zeros(3, tf.float64))
    optimizer = tf.keras.optimizers.Adam(1e-2)
    losses_of = {
        "size": tf.keras.losses.MeanSquaredError(),
        "kind": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "flag": tf.keras.losses.BinaryCrossentropy(from_logits=True),
    }

    @step
    @tf.function
    def train_step(x, answers):
        with tf.GradientTape() as tape:
            features = trunk(x)
            losses = {
                name: losses_of[name](answers[name], head(features)) for name, head in heads.items()
            }
            stacked = tf.stack([losses[name] for name in ("size", "kind", "flag")])
            total = tf.reduce_sum(tf.exp(-log_variances) * stacked + log_variances)
        variables = list(trunk.trainable_variables)
        for head in heads.values():
            variables.extend(head.trainable_variables)
        *grads, grad = tape.gradient(total, [*variables, log_variances])
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        log_variances.assign_sub(0.1 * grad)
        return losses, total

    @nano
    def train(dataset):
        history = []
        for x, answers in dataset:
            losses, total = train_step(x, answers)
            history.append({**{name: float(v) for name, v in losses.items()}, "all": float(total)})
        return history

    x = rows(39, 5)
    answers = {
        "size": targets(x),
        "kind": labels(39),
        "flag": labels(39, 2, seed=6).astype("float64")[:, None],
    }
    history = train(batches(x, answers))
    return history, log_variances, trunk.get_weights(), [h.get_weights() for h in heads.values()]


@program
def custom_metric(nano: Any, step: Any) -> Any:
    """A metric with its own weights and result, reset each epoch; others made by functions."""

    class CategoricalTruePositives(tf.keras.metrics.Metric):
        def __init__(self, name="true_positives", **kwargs):
            super().__init__(name=name, **kwargs)
            self.true_positives = self.add_weight(name="tp", shape=(), initializer="zeros")
            self.rows = self.add_weight(name="rows", shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            hits = tf.cast(tf.equal(y_true, tf.argmax(y_pred, axis=1)), tf.float64)
            self.true_positives.assign_add(tf.reduce_sum(hits))
            self.rows.assign_add(tf.cast(tf.shape(y_true)[0], tf.float64))

        def result(self):
            return tf.convert_to_tensor(self.true_positives) / (self.rows + 1.0)

        def reset_state(self):
            self.true_positives.assign(0.0)
            self.rows.assign(0.0)

    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    metric = CategoricalTruePositives()
    entropy = tf.keras.metrics.MeanMetricWrapper(
        lambda y, p: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int64), p)
    )

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        metric.update_state(y, logits)
        return logits

    @nano
    def train(dataset):
        results = []
        for _epoch in range(2):
            metric.reset_state()
            entropy.reset_state()
            for x, y in dataset:
                logits = train_step(x, y)
                entropy.update_state(y, logits)
            results.append((metric.result(), entropy.result(), float(metric.rows)))
        return results

    return train(batches(rows(37), labels(37))), model.get_weights()


@program
def many_metrics(nano: Any, step: Any) -> Any:
    """Updates precision, recall, AUC, Sum, cosine similarity and RMSE in and outside steps."""
    model = mlp(4, 8, 1, last="sigmoid")
    optimizer = tf.keras.optimizers.Adam(1e-2)
    bce = tf.keras.losses.BinaryCrossentropy()
    inside = [
        tf.keras.metrics.Precision(),
        tf.keras.metrics.Recall(),
        tf.keras.metrics.AUC(num_thresholds=20),
        tf.keras.metrics.TruePositives(),
    ]
    outside = [tf.keras.metrics.RootMeanSquaredError(), tf.keras.metrics.LogCoshError()]
    total = tf.keras.metrics.Sum()

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            probabilities = model(x, training=True)
            loss = bce(y, probabilities)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        for metric in inside:
            metric.update_state(y, probabilities)
        total.update_state(probabilities)
        return loss, probabilities

    @nano
    def train(x, y):
        for batch_x, batch_y in batches(x, y):
            _, probabilities = train_step(batch_x, batch_y)
            for metric in outside:
                metric.update_state(batch_y, probabilities)
        return [metric.result() for metric in [*inside, *outside, total]]

    y = labels(43, 2).astype("float64")[:, None]
    return train(rows(43), y), model.get_weights()


@program
def correlation_losses(nano: Any, step: Any) -> Any:
    """Losses of the batch as a whole: correlation, explained variance, a ranking over pairs."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.SGD(0.1)

    def correlation(a, b):
        a, b = a - tf.reduce_mean(a), b - tf.reduce_mean(b)
        return tf.reduce_sum(a * b) / tf.sqrt(tf.reduce_sum(a**2) * tf.reduce_sum(b**2))

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            prediction = tf.squeeze(model(x), axis=1)
            pearson = correlation(prediction, y)
            r2 = 1 - tf.reduce_sum((y - prediction) ** 2) / tf.reduce_sum(
                (y - tf.reduce_mean(y)) ** 2
            )
            gaps = (prediction[:, None] - prediction[None, :]) * tf.sign(y[:, None] - y[None, :])
            ranking = tf.reduce_mean(tf.nn.softplus(-gaps))
            loss = ranking - pearson - 0.1 * r2
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return pearson, r2, ranking

    @nano
    def train(x, y):
        log = {"pearson": [], "r2": [], "ranking": []}
        for batch in batches(x, y):
            for name, value in zip(log, train_step(*batch), strict=True):
                log[name].append(float(value))
        return log

    x = rows(40)
    return train(x, targets(x)[:, 0]), model.get_weights()


@program
def quantile_losses(nano: Any, step: Any) -> Any:
    """A pinball loss per quantile as closures in a list, outputs of a model as a list."""
    inputs = tf.keras.Input(shape=(4,))
    hidden = tf.keras.layers.Dense(8, activation="tanh")(inputs)
    model = tf.keras.Model(inputs, [tf.keras.layers.Dense(1)(hidden) for _ in range(3)])
    optimizer = tf.keras.optimizers.Adam(1e-2)

    def pinball(q):
        def loss(y, prediction):
            error = y - prediction
            return tf.reduce_mean(tf.maximum(q * error, (q - 1) * error), axis=-1)

        return loss

    losses_of = [pinball(q) for q in (0.1, 0.5, 0.9)]

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            losses = [
                tf.reduce_mean(loss(y, output))
                for loss, output in zip(losses_of, outputs, strict=True)
            ]
            total = sum(losses)
        grads = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        covered = tf.logical_and(y > outputs[0], y < outputs[2])
        return losses, tf.reduce_mean(tf.cast(covered, tf.float64))

    @nano
    def train(x, y):
        return [train_step(*batch) for batch in batches(x, y, size=12)]

    x = rows(38)
    return train(x, targets(x)), model.get_weights()


@program
def center_loss(nano: Any, step: Any) -> Any:
    """Moves centers per class by scatter updates of the rows in the batch."""
    encoder, head = mlp(4, 8, 3), mlp(3, 3)
    centres = tf.Variable(tf.zeros((3, 3), tf.float64))
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            features = encoder(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, head(features))
            gap = features - tf.gather(centres, y)
            pull = tf.reduce_mean(tf.reduce_sum(gap**2, axis=1))
            loss = tf.reduce_mean(losses) + 0.1 * pull
        variables = encoder.trainable_variables + head.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        centres.scatter_add(tf.IndexedSlices(0.05 * gap, y))
        return loss, pull

    @nano
    def train(x, y):
        return [train_step(*batch) for batch in batches(x, y)]

    return train(rows(36), labels(36)), centres, encoder.get_weights(), head.get_weights()
