"""Equations: derivatives by tapes, solvers in loops, fits of few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, mlp, rows
from tensorflow.keras import layers


@program
def pinn_poisson(nano: Any, step: Any) -> Any:
    """Second derivatives with respect to the inputs, boundary points as a second batch."""
    model = mlp(2, 10, 10, 1)
    optimizer = tf.keras.optimizers.Adam(5e-3)

    def residual(xy):
        x, y = xy[:, :1], xy[:, 1:]
        with tf.GradientTape(persistent=True) as second:
            second.watch([x, y])
            with tf.GradientTape(persistent=True) as first:
                first.watch([x, y])
                u = model(tf.concat([x, y], axis=1))
            u_x, u_y = first.gradient(u, x), first.gradient(u, y)
        u_xx, u_yy = second.gradient(u_x, x), second.gradient(u_y, y)
        return u_xx + u_yy + tf.sin(np.pi * x) * tf.sin(np.pi * y)

    @step
    @tf.function
    def train_step(inside, border):
        with tf.GradientTape() as tape:
            physics = tf.reduce_mean(tf.square(residual(inside)))
            edges = tf.reduce_mean(tf.square(model(border)))
            loss = physics + 10.0 * edges
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return physics, edges

    @nano
    def train(steps):
        log = []
        for _ in range(steps):
            inside = tf.random.uniform((20, 2), dtype=tf.float64)
            side = np.random.uniform(size=(9, 1))
            border = np.concatenate([side, np.round(np.random.uniform(size=(9, 1)))], axis=1)
            log.append(train_step(inside, tf.constant(border)))
        return log

    return train(4), model.get_weights()


@program
def pinn_inverse(nano: Any, step: Any) -> Any:
    """Trains an unknown coefficient, a variable, together with the net, eagerly."""
    model = mlp(1, 8, 1)
    coefficient = tf.Variable(0.3, dtype=tf.float64)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    own_optimizer = tf.keras.optimizers.SGD(1e-2)

    @step
    def train_step(t, measured):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(t)
                u = model(t)
            rate = inner.gradient(u, t)
            loss = tf.reduce_mean((u - measured) ** 2) + tf.reduce_mean(
                (rate + coefficient * u) ** 2
            )
        *grads, grad = tape.gradient(loss, [*model.trainable_variables, coefficient])
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        own_optimizer.apply_gradients([(grad, coefficient)])
        return loss

    @nano
    def train(t, measured):
        path = []
        for batch in batches(t, measured):
            path.append((train_step(*batch), float(coefficient)))
        return path

    t = np.linspace(0, 2, 37)[:, None]
    return train(t, np.exp(-0.8 * t)), coefficient, model.get_weights()


@program
def neural_ode(nano: Any, step: Any) -> Any:
    """Integrates by Euler and Runge-Kutta steps in Python; compares several times."""
    field = mlp(2, 8, 2)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    def euler(f, y, dt):
        return y + dt * f(y)

    def rk4(f, y, dt):
        k1 = f(y)
        k2 = f(y + dt / 2 * k1)
        k3 = f(y + dt / 2 * k2)
        k4 = f(y + dt * k3)
        return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def true_field(y):
        return tf.stack([y[:, 1], -y[:, 0] - 0.1 * y[:, 1]], axis=1)

    @step
    @tf.function
    def train_step(start, path):
        with tf.GradientTape() as tape:
            y, loss = start, 0.0
            for t in range(path.shape[1]):
                y = euler(field, y, 0.1) if t % 2 else rk4(field, y, 0.1)
                loss += tf.reduce_mean(tf.abs(y - path[:, t]))
        grads = tape.gradient(loss, field.trainable_variables)
        optimizer.apply_gradients(zip(grads, field.trainable_variables, strict=True))
        return loss, y

    @nano
    def train(starts):
        losses, ends = [], []
        for start in starts:
            path, y = [], start
            for _ in range(4):
                y = rk4(true_field, y, 0.1)
                path.append(y)
            loss, end = train_step(start, tf.stack(path, axis=1))
            losses.append(loss)
            ends.append(tf.reduce_mean(end, axis=0))
        return losses, ends

    return train(batches(rows(27, 2), size=10)), field.get_weights()


@program
def hamiltonian_net(nano: Any, step: Any) -> Any:
    """Derives the motion from a scalar net; a tape inside model.call."""

    class Hamiltonian(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.net = mlp(2, 8, 1)

        def call(self, state):
            with tf.GradientTape() as tape:
                tape.watch(state)
                energy = self.net(state)
            gradient = tape.gradient(energy, state)
            return tf.stack([gradient[:, 1], -gradient[:, 0]], axis=1)

    model = Hamiltonian()
    optimizer = tf.keras.optimizers.Adam(5e-3)
    mean = tf.keras.metrics.Mean()

    @step
    @tf.function
    def train_step(state, motion):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((model(state) - motion) ** 2, axis=-1))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        mean.update_state(loss)

    @nano
    def train(dataset):
        energies = []
        for state, motion in dataset:
            train_step(state, motion)
            energies.append(tf.reduce_sum(model.net(state)).numpy())
        return energies, mean.result()

    states = rows(33, 2)
    motions = np.stack([states[:, 1], -states[:, 0]], axis=1)
    return train(batches(states, motions)), model.net.get_weights()


@program
def deep_ritz(nano: Any, step: Any) -> Any:
    """Minimizes a variational energy over uniform points; the whole loop is one tf.function."""
    model = mlp(1, 8, 1)
    optimizer = tf.keras.optimizers.SGD(0.02)
    optimizer.build(model.trainable_variables)

    @tf.function
    def many_steps(count):
        energies = tf.TensorArray(tf.float64, size=count)
        for i in tf.range(count):
            x = tf.random.uniform((18, 1), dtype=tf.float64)
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    u = model(x) * x * (1 - x)
                slope = inner.gradient(u, x)
                energy = tf.reduce_mean(0.5 * slope**2 - u)
            grads = tape.gradient(energy, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            energies = energies.write(i, energy)
        return energies.stack()

    @nano
    def train():
        return many_steps(tf.constant(4))

    return train(), model.get_weights()


@program
def basic_training_loop(nano: Any, step: Any) -> Any:
    """A tf.Module line fit by assign_sub, slopes kept in lists (guide/basic_training_loops)."""

    class MyModel(tf.Module):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.w = tf.Variable(5.0, dtype=tf.float64)
            self.b = tf.Variable(0.0, dtype=tf.float64)

        def __call__(self, x):
            return self.w * x + self.b

    model = MyModel()
    weights, biases = [], []

    def loss(target_y, predicted_y):
        return tf.reduce_mean(tf.square(target_y - predicted_y))

    def train(model, x, y, learning_rate):
        with tf.GradientTape() as t:
            current_loss = loss(y, model(x))
        dw, db = t.gradient(current_loss, [model.w, model.b])
        model.w.assign_sub(learning_rate * dw)
        model.b.assign_sub(learning_rate * db)

    @nano
    def training_loop(model, x, y):
        losses = []
        for _epoch in range(5):
            train(model, x, y, learning_rate=0.1)
            weights.append(model.w.numpy())
            biases.append(model.b.numpy())
            losses.append(loss(y, model(x)))
        return losses

    x = tf.linspace(tf.constant(-2.0, tf.float64), 2.0, 51)
    y = x * 3.0 + 2.0 + tf.random.normal(shape=[51], dtype=tf.float64)
    return training_loop(model, x, y), weights, biases, model.w, model.b


@program
def polynomial_fit(nano: Any, step: Any) -> Any:
    """Core API regression with shuffled batches and a feature map (guide/core)."""

    class Polynomial(tf.Module):
        def __init__(self, degree):
            super().__init__()
            self.powers = tf.range(degree + 1, dtype=tf.float64)
            self.weights = tf.Variable(tf.random.normal((degree + 1, 1), dtype=tf.float64))

        @tf.function
        def __call__(self, x):
            return tf.pow(x[:, None], self.powers) @ self.weights

    model = Polynomial(3)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            error = model(x)[:, 0] - y
            loss = tf.reduce_mean(error**2) + 0.01 * tf.reduce_sum(tf.abs(model.weights))
        gradient = tape.gradient(loss, model.weights)
        model.weights.assign_sub(0.01 * gradient)
        return loss

    @nano
    def train(dataset, epochs):
        losses = []
        for _epoch in range(epochs):
            batch_losses = []
            for x_batch, y_batch in dataset:
                batch_losses.append(train_step(x_batch, y_batch))
            losses.append(tf.reduce_mean(batch_losses))
        return losses

    x = np.linspace(-1, 1, 45)
    y = 2 * x**3 - x + 0.1 * rows(45, 1)[:, 0]
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(buffer_size=45).batch(16)
    return train(data, 2), model.weights


@program
def logistic_regression_core(nano: Any, step: Any) -> Any:
    """Weights made at the first call, lists of batch losses and accuracies (guide/core)."""

    class LogisticRegression(tf.Module):
        def __init__(self):
            super().__init__()
            self.built = False

        def __call__(self, x, train=True):
            if not self.built:
                rand_w = tf.random.uniform(shape=[x.shape[-1], 1], seed=22, dtype=tf.float64)
                rand_b = tf.random.uniform(shape=[], seed=22, dtype=tf.float64)
                self.w = tf.Variable(rand_w)
                self.b = tf.Variable(rand_b)
                self.built = True
            z = tf.squeeze(tf.add(tf.matmul(x, self.w), self.b), axis=1)
            return z if train else tf.sigmoid(z)

    log_reg = LogisticRegression()

    def log_loss(y_pred, y):
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=y_pred))

    def accuracy(y_pred, y):
        return tf.reduce_mean(tf.cast(tf.equal(y_pred > 0, y > 0.5), tf.float64))

    @nano
    def train(train_dataset, test_dataset):
        train_losses, test_losses, accuracies = [], [], []
        for _epoch in range(2):
            batch_losses, batch_accuracies = [], []
            for x_batch, y_batch in train_dataset:
                with tf.GradientTape() as tape:
                    y_pred = log_reg(x_batch)
                    batch_loss = log_loss(y_pred, y_batch)
                grads = tape.gradient(batch_loss, log_reg.variables)
                for g, v in zip(grads, log_reg.variables, strict=True):
                    v.assign_sub(0.1 * g)
                batch_losses.append(batch_loss)
                batch_accuracies.append(accuracy(y_pred, y_batch))
            test = [log_loss(log_reg(x), y) for x, y in test_dataset]
            train_losses.append(tf.reduce_mean(batch_losses))
            accuracies.append(tf.reduce_mean(batch_accuracies))
            test_losses.append(tf.reduce_mean(test))
        return train_losses, test_losses, accuracies

    y = labels(50, 2).astype("float64")
    result = train(batches(rows(34), y[:34]), batches(rows(16, seed=7), y[34:], size=10))
    return result, [v.numpy() for v in log_reg.variables]


@program
def matrix_factorization(nano: Any, step: Any) -> Any:
    """Embeddings and biases of users and books, a dot product (keras.io, collaborative)."""

    class RecommenderNet(tf.keras.Model):
        def __init__(self, num_users, num_books, size):
            super().__init__()
            regularizer = tf.keras.regularizers.l2(1e-2)
            self.user_embedding = layers.Embedding(
                num_users, size, embeddings_regularizer=regularizer
            )
            self.user_bias = layers.Embedding(num_users, 1)
            self.book_embedding = layers.Embedding(num_books, size)
            self.book_bias = layers.Embedding(num_books, 1)

        def call(self, inputs):
            user, book = inputs[:, 0], inputs[:, 1]
            product = self.user_embedding(user) * self.book_embedding(book)
            dot = tf.reduce_sum(product, axis=1, keepdims=True)
            return tf.nn.sigmoid(dot + self.user_bias(user) + self.book_bias(book))

    model = RecommenderNet(7, 9, 3)
    optimizer = tf.keras.optimizers.Adam(5e-2)
    loss_fn = tf.keras.losses.BinaryCrossentropy()

    @step
    @tf.function
    def train_step(pairs, ratings):
        with tf.GradientTape() as tape:
            loss = loss_fn(ratings, model(pairs, training=True)) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(pairs, ratings):
        order = np.random.permutation(len(pairs))
        losses = []
        for start in range(0, len(order), 16):
            rows_ = order[start : start + 16]
            losses.append(train_step(pairs[rows_], ratings[rows_]))
        return losses

    pairs = np.stack([labels(45, 7), labels(45, 9, seed=6)], axis=1)
    ratings = np.random.default_rng(0).uniform(size=(45, 1))
    return train(pairs, ratings), [v.numpy() for v in model.trainable_variables]


@program
def gaussian_likelihood(nano: Any, step: Any) -> Any:
    """A mixture density net: weights, means and scales of three normal curves."""
    net = mlp(1, 8, 9)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    log_2pi = np.log(2 * np.pi)

    def negative_log_likelihood(y, out):
        logits, means, log_scales = tf.split(out, 3, axis=-1)
        z = (y - means) * tf.exp(-log_scales)
        log_normal = -0.5 * z**2 - log_scales - 0.5 * log_2pi
        return -tf.reduce_logsumexp(tf.nn.log_softmax(logits) + log_normal, axis=-1)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            losses = negative_log_likelihood(y, net(x))
            loss = tf.math.reduce_mean(losses)
        grads = tape.gradient(loss, net.trainable_variables)
        grads = [tf.clip_by_norm(g, 1.0) for g in grads]
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return tf.math.reduce_sum(losses)

    @nano
    def train(x, y):
        total = 0.0
        for batch_x, batch_y in batches(x, y):
            total += train_step(batch_x, batch_y)
        return total / len(x)

    x = rows(40, 1)
    return train(x, np.sign(x) * x**2 + 0.1 * rows(40, 1, seed=4)), net.get_weights()
