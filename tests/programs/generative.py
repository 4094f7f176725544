"""Flows, diffusion and energies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, mlp, rows
from tensorflow.keras import layers, regularizers


def _coupling(inputs: int) -> Any:
    source = tf.keras.Input(shape=(inputs,))
    shift = layers.Dense(8, activation="relu", kernel_regularizer=regularizers.l2(0.01))(source)
    shift = layers.Dense(inputs, kernel_regularizer=regularizers.l2(0.01))(shift)
    scale = layers.Dense(8, activation="relu", kernel_regularizer=regularizers.l2(0.01))(source)
    scale = layers.Dense(inputs, activation="tanh")(scale)
    return tf.keras.Model(inputs=source, outputs=[scale, shift])


class RealNVP(tf.keras.Model):
    """Coupling layers with alternating masks."""

    def __init__(self, num_coupling_layers: int) -> None:
        super().__init__()
        self.num_coupling_layers = num_coupling_layers
        self.masks = np.array([[0, 1], [1, 0]] * (num_coupling_layers // 2), dtype="float64")
        self.loss_tracker = tf.keras.metrics.Mean(name="loss")
        self.layers_list = [_coupling(2) for _ in range(num_coupling_layers)]

    def call(self, x: Any, training: Any = True) -> Any:
        log_det_inv = 0.0
        direction = -1 if training else 1
        for i in range(self.num_coupling_layers)[::direction]:
            x_masked = x * self.masks[i]
            reversed_mask = 1 - self.masks[i]
            s, t = self.layers_list[i](x_masked)
            s *= reversed_mask
            t *= reversed_mask
            gate = (direction - 1) / 2
            forward = x * tf.exp(direction * s) + direction * t * tf.exp(gate * s)
            x = reversed_mask * forward + x_masked
            log_det_inv += gate * tf.reduce_sum(s, axis=1)
        return x, log_det_inv

    def log_loss(self, x: Any) -> Any:
        y, logdet = self(x)
        log_prob = -0.5 * tf.reduce_sum(y**2, axis=1) - math.log(2 * math.pi)
        return -tf.reduce_mean(log_prob + logdet)


@program
def real_nvp(nano: Any, step: Any) -> Any:
    """A normalizing flow on two moons' worth of points (keras.io/examples/generative/real_nvp)."""
    angle = np.linspace(0, np.pi, 30)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.1 * rows(30, 2)
    model = RealNVP(2)
    optimizer = tf.keras.optimizers.Adam(1e-3)

    @step
    @tf.function
    def train_step(data):
        with tf.GradientTape() as tape:
            loss = model.log_loss(data)
        g = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(g, model.trainable_variables, strict=True))
        model.loss_tracker.update_state(loss)
        return {"loss": model.loss_tracker.result()}

    @step
    @tf.function
    def test_step(data):
        loss = model.log_loss(data)
        model.loss_tracker.update_state(loss)
        return {"loss": model.loss_tracker.result()}

    @nano
    def fit(train_data, validation):
        history = {"loss": [], "val_loss": []}
        for _ in range(2):
            model.loss_tracker.reset_state()
            for data in train_data:
                logs = train_step(data)
            history["loss"].append(float(logs["loss"]))
            model.loss_tracker.reset_state()
            for data in validation:
                logs = test_step(data)
            history["val_loss"].append(float(logs["loss"]))
        return history

    history = fit(batches(points, size=12), batches(rows(10, 2, seed=6), size=6))
    return history, [net.get_weights() for net in model.layers_list]


@program
def diffusion(nano: Any, step: Any) -> Any:
    """Noise prediction at random times, with an average network (keras.io/examples, ddpm)."""
    TIMESTEPS = 20
    betas = np.linspace(1e-3, 0.2, TIMESTEPS)
    alphas_bar = np.cumprod(1 - betas)
    network, ema_network = mlp(3 + 4, 12, 3), mlp(3 + 4, 12, 3)
    ema_network.set_weights(network.get_weights())
    optimizer = tf.keras.optimizers.Adam(2e-3)
    loss_fn = tf.keras.losses.MeanSquaredError()
    table = tf.random.normal((TIMESTEPS, 4), dtype=tf.float64)

    def q_sample(x_start, t, noise):
        at = tf.gather(tf.constant(alphas_bar), t)[:, None]
        return tf.sqrt(at) * x_start + tf.sqrt(1 - at) * noise

    @step
    @tf.function
    def train_step(rows_):
        batch_size = tf.shape(rows_)[0]
        t = tf.random.uniform(minval=0, maxval=TIMESTEPS, shape=(batch_size,), dtype=tf.int64)
        with tf.GradientTape() as tape:
            noise = tf.random.normal(shape=tf.shape(rows_), dtype=rows_.dtype)
            noised = q_sample(rows_, t, noise)
            inputs = tf.concat([noised, tf.gather(table, t)], axis=-1)
            loss = loss_fn(noise, network(inputs, training=True))
        gradients = tape.gradient(loss, network.trainable_weights)
        optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))
        for weight, ema_weight in zip(network.weights, ema_network.weights, strict=True):
            ema_weight.assign(0.99 * ema_weight + (1 - 0.99) * weight)
        return {"loss": loss}

    def generate(count):
        samples = tf.random.normal((count, 3), dtype=tf.float64)
        for t in reversed(range(0, TIMESTEPS, 5)):
            times = tf.repeat(table[t : t + 1], count, axis=0)
            noise = ema_network(tf.concat([samples, times], axis=-1), training=False)
            samples -= betas[t] / np.sqrt(1 - alphas_bar[t]) * noise
        return samples

    @nano
    def train(data):
        losses = []
        for _epoch in range(2):
            for batch in data:
                losses.append(train_step(batch)["loss"])
        return losses, generate(5)

    found = train(batches(rows(41, 3)))
    return found, network.get_weights(), ema_network.get_weights()


@program
def denoising_diffusion_rates(nano: Any, step: Any) -> Any:
    """Continuous noise rates and a Normalization layer adapted before (keras.io, ddim)."""
    data = 3.0 + 2.0 * rows(35, 4)
    normalizer = layers.Normalization()
    normalizer.adapt(data)
    network = mlp(5, 10, 4, activation="swish")
    optimizer = tf.keras.optimizers.Adam(1e-3)
    noise_loss_tracker = tf.keras.metrics.Mean(name="n_loss")
    data_loss_tracker = tf.keras.metrics.Mean(name="d_loss")

    def diffusion_schedule(times):
        start, end = tf.acos(tf.constant(0.95, tf.float64)), tf.acos(tf.constant(0.02, tf.float64))
        angles = start + times * (end - start)
        return tf.sin(angles), tf.cos(angles)

    def denoise(noisy, noise_rates, signal_rates):
        pred_noises = network(tf.concat([noisy, noise_rates**2], axis=1), training=True)
        return pred_noises, (noisy - noise_rates * pred_noises) / signal_rates

    @step
    @tf.function
    def train_step(batch):
        batch = normalizer(batch)
        noises = tf.random.normal(shape=tf.shape(batch), dtype=tf.float64)
        times = tf.random.uniform((tf.shape(batch)[0], 1), 0.0, 1.0, dtype=tf.float64)
        noise_rates, signal_rates = diffusion_schedule(times)
        noisy = signal_rates * batch + noise_rates * noises
        with tf.GradientTape() as tape:
            pred_noises, pred = denoise(noisy, noise_rates, signal_rates)
            noise_loss = tf.reduce_mean(tf.abs(noises - pred_noises))
            data_loss = tf.reduce_mean(tf.abs(batch - pred))
        gradients = tape.gradient(noise_loss, network.trainable_weights)
        optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))
        noise_loss_tracker.update_state(noise_loss)
        data_loss_tracker.update_state(data_loss)

    @nano
    def train(x):
        for batch in tf.data.Dataset.from_tensor_slices(x).shuffle(35, seed=4).batch(12):
            train_step(batch)
        return [noise_loss_tracker.result(), data_loss_tracker.result()]

    return train(data), network.get_weights()


@program
def energy_model(nano: Any, step: Any) -> Any:
    """Finds low energies by Langevin steps on the input; a replay list keeps their ends."""
    energy = mlp(2, 8, 1)
    optimizer = tf.keras.optimizers.Adam(3e-3)
    replay = []

    @tf.function
    def langevin(x):
        for _ in tf.range(4):
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(energy(x))
            noise = tf.random.normal(tf.shape(x), stddev=0.01, dtype=x.dtype)
            x = x - 0.1 * tape.gradient(total, x) + noise
        return x

    @step
    @tf.function
    def train_step(real, start):
        fake = tf.stop_gradient(langevin(start))
        with tf.GradientTape() as tape:
            positive, negative = energy(real), energy(fake)
            loss = tf.reduce_mean(positive) - tf.reduce_mean(negative)
            loss += 0.1 * tf.reduce_mean(positive**2 + negative**2)
        grads = tape.gradient(loss, energy.trainable_variables)
        optimizer.apply_gradients(zip(grads, energy.trainable_variables, strict=True))
        return loss, fake

    @nano
    def train(data):
        losses = []
        for real in data:
            start = np.random.uniform(-1, 1, size=(len(real), 2))
            loss, fake = train_step(real, start)
            losses.append(float(loss))
            replay.extend(fake.numpy())
        return losses

    return train(batches(rows(38, 2))), np.stack(replay), energy.get_weights()


@program
def sliced_score_matching(nano: Any, step: Any) -> Any:
    """Multiplies the score's Jacobian with random vectors in the loss."""
    score = mlp(3, 8, 3)
    optimizer = tf.keras.optimizers.SGD(0.02)

    @step
    @tf.function
    def train_step(x):
        vectors = tf.random.normal(tf.shape(x), dtype=x.dtype)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                s = score(x)
                projected = tf.reduce_sum(s * vectors)
            curvature = tf.reduce_sum(inner.gradient(projected, x) * vectors, axis=-1)
            loss = tf.reduce_mean(curvature + 0.5 * tf.reduce_sum(s * vectors, axis=-1) ** 2)
        grads = tape.gradient(loss, score.trainable_variables)
        optimizer.apply_gradients(zip(grads, score.trainable_variables, strict=True))
        return loss

    @nano
    def train():
        losses = []
        for x in batches(rows(30, 3, seed=11), size=8):
            losses.append(train_step(x))
        return losses

    return train(), score.get_weights()
