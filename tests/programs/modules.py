"""Parts of models: tf.Module, layers on their own, control flow, counters, recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, mlp, rows, targets
from tensorflow.keras import layers


class Dense(tf.Module):
    """A dense layer of TensorFlow's own (guide/intro_to_modules)."""

    def __init__(self, in_features: int, out_features: int, name: Any = None) -> None:
        super().__init__(name=name)
        start = tf.random.normal([in_features, out_features], dtype=tf.float64)
        self.w = tf.Variable(start, name="w")
        self.b = tf.Variable(tf.zeros([out_features], tf.float64), name="b")

    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(tf.matmul(x, self.w) + self.b)


class SequentialModule(tf.Module):
    """Two dense layers, and a counter that is not trained."""

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self.dense_1 = Dense(in_features=4, out_features=8)
        self.dense_2 = Dense(in_features=8, out_features=2)
        self.calls = tf.Variable(0, dtype=tf.int64, trainable=False)

    def __call__(self, x: Any) -> Any:
        self.calls.assign_add(1)
        return self.dense_2(self.dense_1(x))


@program
def nested_modules(nano: Any, step: Any) -> Any:
    """Modules within modules, trained by the module's own variables (guide/intro_to_modules)."""
    model = SequentialModule(name="the_model")

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.02 * gradient)
        return loss

    @nano
    def train(dataset):
        return [train_step(x, y) for x, y in dataset]

    x = rows(41)
    return train(batches(x, targets(x, 2))), [v.numpy() for v in model.variables]


@program
def recomputed_gradients(nano: Any, step: Any) -> Any:
    """tf.recompute_grad around blocks of a deep net."""
    kernels = [
        tf.Variable(tf.random.normal((4, 4), stddev=0.5, dtype=tf.float64)) for _ in range(3)
    ]
    head = tf.Variable(tf.random.normal((4, 1), dtype=tf.float64))
    optimizer = tf.keras.optimizers.SGD(0.05)

    def block(x, kernel):
        return x + tf.tanh(x @ kernel)

    cheap = tf.recompute_grad(block)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = cheap(x, kernel)
            loss = tf.reduce_mean(tf.square(x @ head - y))
        variables = [*kernels, head]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @nano
    def train(dataset):
        return [train_step(x, y) for x, y in dataset]

    x = rows(37)
    return train(batches(x, targets(x))), kernels, head


@program
def branches_with_layers(nano: Any, step: Any) -> Any:
    """Uses tf.cond and an if on a tensor, with a layer in each branch, by the step's counter."""
    first, second, out = layers.Dense(6), layers.Dense(6, activation="tanh"), layers.Dense(1)
    for layer, width in ((first, 4), (second, 4), (out, 6)):
        layer.build((None, width))
    optimizer = tf.keras.optimizers.SGD(0.05)
    counter = tf.Variable(0, dtype=tf.int32, trainable=False)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            hidden = tf.cond(counter % 2 == 0, lambda: first(x), lambda: second(x))
            if counter > 1:
                hidden = tf.nn.relu(hidden)
                hidden = hidden + 0.1
            else:
                hidden = hidden * 0.5
            loss = tf.reduce_mean(tf.square(out(hidden) - y))
        variables = [v for part in (first, second, out) for v in part.trainable_variables]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        counter.assign_add(1)
        return loss

    @nano
    def train(dataset):
        return [train_step(x, y) for x, y in dataset]

    x = rows(45)
    losses = train(batches(x, targets(x), size=12))
    return losses, counter, [part.get_weights() for part in (first, second, out)]


@program
def while_loop_with_layer(nano: Any, step: Any) -> Any:
    """Calls a layer repeatedly in tf.while_loop and in a Python while on a tensor."""
    cell = layers.Dense(4, activation="tanh")
    cell.build((None, 4))
    out = mlp(4, 1)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(x, y, times):
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(
                lambda i, h: i < times,
                lambda i, h: (i + 1, h + 0.3 * cell(h)),
                (tf.constant(0), x),
            )
            left = times
            while left > 1:
                h = 0.9 * h
                left -= 1
            loss = tf.reduce_mean(tf.square(out(h) - y))
        variables = cell.trainable_variables + out.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @nano
    def train(dataset):
        losses = []
        for number, (x, y) in enumerate(dataset):
            losses.append(train_step(x, y, tf.constant(2 + number % 2)))
        return losses

    x = rows(39)
    return train(batches(x, targets(x))), cell.get_weights(), out.get_weights()


class ComputeSum(layers.Layer):
    """Keeps a total, a count of calls and a running mean in non-trainable weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.total = self.add_weight(
            name="total", shape=(width,), initializer="zeros", trainable=False
        )
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(
            name="mean", shape=(width,), initializer="zeros", trainable=False
        )

    def call(self, inputs: Any, training: Any = False) -> Any:
        if training:
            self.total.assign_add(tf.reduce_sum(inputs, axis=0))
            self.calls.assign_add(1.0)
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
        return inputs - self.mean


@program
def counters_in_layers(nano: Any, step: Any) -> Any:
    """Assigns non-trainable weights in call, from sums and means of the batch."""
    counting = ComputeSum(6)
    model = tf.keras.Sequential(
        [tf.keras.Input(shape=(4,)), layers.Dense(6, activation="tanh"), counting, layers.Dense(1)]
    )
    optimizer = tf.keras.optimizers.SGD(0.05)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        losses = [train_step(x, y) for x, y in dataset]
        return losses, np.array(counting.total)

    x = rows(37)
    return train(batches(x, targets(x))), counting.get_weights(), model.get_weights()


@program
def layers_on_their_own(nano: Any, step: Any) -> Any:
    """Uses no model: layers in a list are called one after another, some with training."""
    stack = [
        layers.Dense(8),
        layers.BatchNormalization(momentum=0.8),
        layers.Activation("elu"),
        layers.GaussianNoise(0.1),
        layers.Dense(8),
        layers.LayerNormalization(),
        layers.Dropout(0.2),
        layers.Dense(1),
    ]
    optimizer = tf.keras.optimizers.Adam(1e-2)
    plain = (layers.Dense, layers.LayerNormalization, layers.Activation)

    def forward(x, training):
        for layer in stack:
            x = layer(x) if isinstance(layer, plain) else layer(x, training=training)
        return x

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(x, True) - y))
        variables = [v for layer in stack for v in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @nano
    def train(dataset, probe):
        losses, probed = [], []
        for x, y in dataset:
            losses.append(train_step(x, y))
            probed.append(forward(probe, False).numpy())
        return losses, probed

    x = rows(43)
    result = train(batches(x, targets(x)), rows(3, seed=9))
    return result, [layer.get_weights() for layer in stack if layer.weights]


@program
def regularized_subclass(nano: Any, step: Any) -> Any:
    """Activity and kernel regularizers, add_loss in a layer and in a model, all in losses."""

    class OrthogonalRegularizer(tf.keras.regularizers.Regularizer):
        def __init__(self, strength):
            self.strength = strength

        def __call__(self, kernel):
            product = tf.transpose(kernel) @ kernel
            off = product - tf.eye(kernel.shape[1], dtype=product.dtype)
            return self.strength * tf.reduce_sum(tf.square(off))

    class Quiet(layers.Layer):
        def __init__(self, rate):
            super().__init__()
            self.rate = rate

        def call(self, inputs):
            self.add_loss(self.rate * tf.reduce_mean(tf.abs(inputs)))
            return inputs

    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(
                6, activation="relu", kernel_regularizer=OrthogonalRegularizer(1e-2)
            )
            self.quiet = Quiet(1e-1)
            self.second = layers.Dense(
                4, activity_regularizer=tf.keras.regularizers.L2(1e-2), activation="tanh"
            )
            self.last = layers.Dense(1, bias_regularizer="l2")

        def call(self, inputs):
            return self.last(self.second(self.quiet(self.first(inputs))))

    model = Model()
    optimizer = tf.keras.optimizers.SGD(0.05)
    mse = tf.keras.losses.MeanSquaredError()

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            error = mse(y, model(x, training=True))
            penalty = sum(model.losses)
            loss = error + penalty
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        return error, penalty

    @nano
    def train(dataset):
        return [train_step(x, y) for x, y in dataset]

    x = rows(36)
    return train(batches(x, targets(x), size=14)), model.get_weights()
