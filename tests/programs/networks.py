"""Networks of other structures: experts, normalizations by hand, hypernetworks, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, images, labels, mlp, rows, targets
from tensorflow.keras import layers


@program
def spectral_norm_by_hand(nano: Any, step: Any) -> Any:
    """Power iteration on a kernel kept in a variable, a layer written with add_weight."""

    class SpectralDense(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units

        def build(self, input_shape):
            self.w = self.add_weight(
                name="w",
                shape=(input_shape[-1], self.units),
                initializer="random_normal",
                trainable=True,
            )
            self.u = self.add_weight(
                name="u",
                shape=(1, self.units),
                initializer=tf.keras.initializers.RandomNormal(seed=4),
                trainable=False,
            )

        def call(self, inputs, training=False):
            v = tf.math.l2_normalize(tf.matmul(self.u, self.w, transpose_b=True))
            u = tf.math.l2_normalize(tf.matmul(v, self.w))
            sigma = tf.matmul(tf.matmul(v, self.w), u, transpose_b=True)
            if training:
                self.u.assign(tf.stop_gradient(u))
            return tf.matmul(inputs, self.w / sigma)

    first, second = SpectralDense(6), SpectralDense(1)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            out = second(tf.nn.leaky_relu(first(x, training=True)), training=True)
            loss = tf.reduce_mean(tf.square(out - y))
        variables = first.trainable_variables + second.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @nano
    def train(x, y):
        losses = []
        for batch in batches(x, y):
            losses.append(float(train_step(*batch)))
        return losses

    x = rows(35)
    return train(x, targets(x)), first.get_weights(), second.get_weights()


@program
def mixture_of_experts(nano: Any, step: Any) -> Any:
    """Uses a soft gate, experts in a list, and a loss on the balance of the batch over them."""
    gate, experts = mlp(4, 3), [mlp(4, 5, 1) for _ in range(3)]
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            shares = tf.nn.softmax(gate(x))
            answers = tf.concat([expert(x) for expert in experts], axis=1)
            error = tf.reduce_mean(tf.square(tf.reduce_sum(shares * answers, axis=1) - y[:, 0]))
            importance = tf.reduce_sum(shares, axis=0)
            mean, variance = tf.nn.moments(importance, axes=[0])
            loss = error + 0.1 * variance / (mean**2 + 1e-10)
        variables = list(gate.trainable_variables)
        for expert in experts:
            variables += expert.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return error, importance

    @nano
    def train(dataset):
        errors, used = [], np.zeros(3)
        for x, y in dataset:
            error, importance = train_step(x, y)
            errors.append(error)
            used += importance.numpy()
        return errors, used

    x = rows(40)
    result = train(batches(x, targets(x)))
    return result, gate.get_weights(), [expert.get_weights() for expert in experts]


@program
def custom_gradients(nano: Any, step: Any) -> Any:
    """tf.custom_gradient: a reversed gradient for a domain head, and clipping on the way back."""

    @tf.custom_gradient
    def reverse(x):
        def grad(upstream):
            return -0.5 * upstream

        return tf.identity(x), grad

    @tf.custom_gradient
    def clip_backward(x):
        def grad(upstream):
            return tf.clip_by_norm(upstream, 0.5)

        return x * 1.0, grad

    features, task, domain = mlp(4, 6, last="tanh"), mlp(6, 1), mlp(6, 1)
    optimizer = tf.keras.optimizers.SGD(0.1)
    bce = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @step
    @tf.function
    def train_step(source, y, target):
        with tf.GradientTape() as tape:
            from_source, from_target = features(source), features(target)
            error = tf.reduce_mean(tf.square(task(from_source) - y))
            logits = domain(reverse(tf.concat([from_source, from_target], axis=0)))
            where = tf.concat(
                [tf.ones_like(y), tf.zeros((tf.shape(target)[0], 1), y.dtype)], axis=0
            )
            confusion = bce(where, clip_backward(logits))
            loss = error + confusion
        parts = (features, task, domain)
        variables = [v for part in parts for v in part.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return error, confusion

    @nano
    def train(source, target):
        log = []
        for (x, y), z in zip(source, target, strict=False):
            log.append(train_step(x, y, z))
        return log

    x = rows(36)
    log = train(batches(x, targets(x), size=12), batches(rows(30, seed=4) + 1, size=10))
    return log, features.get_weights(), task.get_weights(), domain.get_weights()


@program
def batch_norm_kinds(nano: Any, step: Any) -> Any:
    """Batch, layer, group and unit normalization in a row; inference between the steps."""
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(4, 3, strides=2),
            layers.BatchNormalization(center=False),
            layers.DepthwiseConv2D(2),
            layers.GroupNormalization(2),
            layers.SeparableConv2D(4, 2, activation="gelu"),
            layers.Flatten(),
            layers.UnitNormalization(),
            layers.Dense(3),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.5)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, y, probe):
        losses, answers = [], []
        for batch in batches(x, y, size=11):
            losses.append(train_step(*batch))
            answers.append(model(probe, training=False))
        return losses, answers

    return train(images(27), labels(27), images(2, seed=8)), model.get_weights()


@program
def batch_norm_by_hand(nano: Any, step: Any) -> Any:
    """Uses moments of the batch, moving averages in variables, and those averages at the end."""
    w = tf.Variable(tf.random.normal((4, 5), dtype=tf.float64))
    gamma, beta = tf.Variable(tf.ones(5, tf.float64)), tf.Variable(tf.zeros(5, tf.float64))
    out = tf.Variable(tf.random.normal((5, 1), dtype=tf.float64))
    moving = [tf.Variable(tf.zeros(5, tf.float64)), tf.Variable(tf.ones(5, tf.float64))]

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            h = x @ w
            mean = tf.reduce_mean(h, axis=0)
            variance = tf.math.reduce_variance(h, axis=0)
            h = tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-5)
            loss = tf.reduce_mean(tf.square(tf.nn.relu(h) @ out - y))
        variables = [w, gamma, beta, out]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * gradient)
        for old, new in zip(moving, (mean, variance), strict=True):
            old.assign(0.7 * old + 0.3 * new)
        return loss

    @nano
    def train(dataset, probe):
        losses = [train_step(x, y) for x, y in dataset]
        h = tf.nn.batch_normalization(probe @ w, moving[0], moving[1], beta, gamma, 1e-5)
        return losses, tf.nn.relu(h) @ out

    x = rows(40)
    return train(batches(x, targets(x)), rows(4, seed=6)), w, gamma, beta, out, moving


@program
def hypernetwork(nano: Any, step: Any) -> Any:
    """A net writes the weights of another for each row, used with einsum and map_fn."""
    hyper = mlp(2, 6, 4 * 3 + 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    def one_row(arguments):
        x, weights = arguments
        hidden = tf.tanh(tf.linalg.matvec(tf.reshape(weights[:12], (3, 4)), x))
        return tf.reduce_sum(hidden * weights[12:])

    @step
    @tf.function
    def train_step(x, context, y):
        with tf.GradientTape() as tape:
            weights = hyper(context)
            out = tf.map_fn(one_row, (x, weights), fn_output_signature=tf.float64)
            loss = tf.reduce_mean(tf.square(out - y))
        grads = tape.gradient(loss, hyper.trainable_variables)
        optimizer.apply_gradients(zip(grads, hyper.trainable_variables, strict=True))
        return loss, out

    @nano
    def train(dataset):
        losses, outs = [], []
        for x, context, y in dataset:
            loss, out = train_step(x, context, y)
            losses.append(loss)
            outs.append(out.numpy())
        return losses, np.concatenate(outs)

    x = rows(26)
    data = batches(x, rows(26, 2, seed=7), targets(x)[:, 0], size=10)
    return train(data), hyper.get_weights()


@program
def multi_input_model(nano: Any, step: Any) -> Any:
    """A functional model with named inputs of three kinds and a dictionary of outputs."""
    number = tf.keras.Input(shape=(3,), name="number")
    word = tf.keras.Input(shape=(), dtype="int64", name="word")
    picture = tf.keras.Input(shape=(8, 8, 1), name="picture")
    parts = [
        layers.Dense(4, activation="relu")(number),
        layers.Embedding(6, 3)(word),
        layers.GlobalMaxPooling2D()(layers.Conv2D(3, 3)(picture)),
    ]
    joined = layers.Concatenate()(parts)
    outputs = {"value": layers.Dense(1)(joined), "group": layers.Dense(3)(joined)}
    inputs = {"number": number, "word": word, "picture": picture}
    model = tf.keras.Model(inputs=inputs, outputs=outputs)
    optimizer = tf.keras.optimizers.Adam(5e-3)
    metrics = {name: tf.keras.metrics.Mean() for name in outputs}

    @step
    @tf.function
    def train_step(features, value, group):
        with tf.GradientTape() as tape:
            found = model(features, training=True)
            losses = {
                "value": tf.reduce_mean(tf.abs(found["value"][:, 0] - value)),
                "group": tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(group, found["group"])
                ),
            }
            total = losses["value"] + 0.5 * losses["group"]
        grads = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        for name, loss in losses.items():
            metrics[name].update_state(loss)
        return found

    @nano
    def train(dataset):
        found = []
        for features, value, group in dataset:
            found.append(train_step(features, value, group)["value"])
        return tf.concat(found, axis=0), {name: m.result() for name, m in metrics.items()}

    features = {"number": rows(29, 3), "word": labels(29, 6), "picture": images(29)}
    data = tf.data.Dataset.from_tensor_slices((features, rows(29, 1)[:, 0], labels(29)))
    return train(data.batch(10)), model.get_weights()


@program
def graph_convolution(nano: Any, step: Any) -> Any:
    """One graph, all nodes in each step, masks for training; sparse matrix products."""
    generator = np.random.default_rng(0)
    adjacency = (generator.uniform(size=(24, 24)) < 0.15).astype("float64")
    adjacency = np.maximum(adjacency, adjacency.T) + np.eye(24)
    scale = 1 / np.sqrt(adjacency.sum(axis=1))
    graph = tf.sparse.from_dense(adjacency * scale[:, None] * scale[None, :])
    features, answers = tf.constant(rows(24, 5)), tf.constant(labels(24))
    training_mask = tf.constant((np.arange(24) < 15).astype("float64"))
    weights = [
        tf.Variable(tf.random.normal(shape, stddev=0.5, dtype=tf.float64))
        for shape in ((5, 6), (6, 3))
    ]
    optimizer = tf.keras.optimizers.Adam(2e-2)

    @tf.function
    def train_step():
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.sparse.sparse_dense_matmul(graph, features @ weights[0]))
            logits = tf.sparse.sparse_dense_matmul(graph, hidden @ weights[1])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(answers, logits)
            loss = tf.reduce_sum(losses * training_mask) / tf.reduce_sum(training_mask)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @nano
    def train(epochs):
        return [train_step() for _ in range(epochs)]

    return train(4), weights
