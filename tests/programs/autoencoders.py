"""Autoencoders and other models of a data distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, images, mlp, rows
from tensorflow.keras import layers


class CVAE(tf.keras.Model):
    """A convolutional variational autoencoder."""

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.encoder = tf.keras.Sequential(
            [
                tf.keras.Input(shape=(8, 8, 1)),
                layers.Conv2D(4, 3, strides=(2, 2), activation="relu"),
                layers.Flatten(),
                layers.Dense(latent_dim + latent_dim),
            ]
        )
        self.decoder = tf.keras.Sequential(
            [
                tf.keras.Input(shape=(latent_dim,)),
                layers.Dense(4 * 4 * 3, activation="relu"),
                layers.Reshape((4, 4, 3)),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
            ]
        )

    @tf.function
    def sample(self, eps: Any) -> Any:
        return self.decode(eps, apply_sigmoid=True)

    def encode(self, x: Any) -> Any:
        return tf.split(self.encoder(x), num_or_size_splits=2, axis=1)

    def reparameterize(self, mean: Any, logvar: Any) -> Any:
        eps = tf.random.normal(shape=tf.shape(mean), dtype=mean.dtype)
        return eps * tf.exp(logvar * 0.5) + mean

    def decode(self, z: Any, apply_sigmoid: bool = False) -> Any:
        logits = self.decoder(z)
        return tf.sigmoid(logits) if apply_sigmoid else logits


@program
def vae_train_loop(nano: Any, step: Any) -> Any:
    """Trains encode/decode methods in a loop with a test pass (tutorials/generative/cvae)."""
    optimizer = tf.keras.optimizers.Adam(1e-3)
    model = CVAE(2)

    def log_normal_pdf(sample, mean, logvar):
        log2pi = tf.math.log(tf.constant(2.0 * np.pi, dtype=tf.float64))
        inner = (sample - mean) ** 2.0 * tf.exp(-logvar) + logvar + log2pi
        return tf.reduce_sum(-0.5 * inner, axis=1)

    def compute_loss(model, x):
        mean, logvar = model.encode(x)
        z = model.reparameterize(mean, logvar)
        x_logit = model.decode(z)
        cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
        logpx_z = -tf.reduce_sum(cross_ent, axis=[1, 2, 3])
        logpz = log_normal_pdf(z, 0.0, tf.zeros_like(mean))
        logqz_x = log_normal_pdf(z, mean, logvar)
        return -tf.reduce_mean(logpx_z + logpz - logqz_x)

    @step
    @tf.function
    def train_step(model, x, optimizer):
        with tf.GradientTape() as tape:
            loss = compute_loss(model, x)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @nano
    def train(train_dataset, test_dataset, epochs):
        elbos = []
        for _ in range(epochs):
            for train_x in train_dataset:
                train_step(model, train_x, optimizer)
            loss = tf.keras.metrics.Mean()
            for test_x in test_dataset:
                loss(compute_loss(model, test_x))
            elbos.append(-loss.result())
        return elbos

    elbos = train(batches(images(23), size=8), batches(images(10, seed=4), size=8), 2)
    drawn = model.sample(tf.random.normal((3, 2), dtype=tf.float64))
    return elbos, drawn, model.encoder.get_weights(), model.decoder.get_weights()


class Sampling(layers.Layer):
    """Draws z around the mean."""

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var = inputs
        epsilon = tf.random.normal(shape=tf.shape(z_mean), dtype=z_mean.dtype)
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


class Encoder(layers.Layer):
    """Maps rows to the mean, the log of the variance and a sample of z."""

    def __init__(self, latent_dim: int = 2, intermediate_dim: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense_proj = layers.Dense(intermediate_dim, activation="relu")
        self.dense_mean = layers.Dense(latent_dim)
        self.dense_log_var = layers.Dense(latent_dim)
        self.sampling = Sampling()

    def call(self, inputs: Any) -> Any:
        x = self.dense_proj(inputs)
        z_mean = self.dense_mean(x)
        z_log_var = self.dense_log_var(x)
        return z_mean, z_log_var, self.sampling((z_mean, z_log_var))


class VariationalAutoEncoder(tf.keras.Model):
    """Adds its divergence with add_loss."""

    def __init__(self, original_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = Encoder()
        self.hidden = layers.Dense(8, activation="relu")
        self.head = layers.Dense(original_dim)

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var, z = self.encoder(inputs)
        kl = -0.5 * tf.reduce_mean(z_log_var - tf.square(z_mean) - tf.exp(z_log_var) + 1)
        self.add_loss(kl)
        return self.head(self.hidden(z))


@program
def vae_add_loss(nano: Any, step: Any) -> Any:
    """Builds a VAE from nested layers with its divergence in model.losses (guide on new layers)."""
    vae = VariationalAutoEncoder(6)
    optimizer = tf.keras.optimizers.Adam(learning_rate=1e-3)
    mse_loss_fn = tf.keras.losses.MeanSquaredError()
    loss_metric = tf.keras.metrics.Mean()
    shown = []

    @step
    @tf.function
    def train_step(x_batch_train):
        with tf.GradientTape() as tape:
            reconstructed = vae(x_batch_train)
            loss = mse_loss_fn(x_batch_train, reconstructed)
            loss += sum(vae.losses)
        grads = tape.gradient(loss, vae.trainable_weights)
        optimizer.apply_gradients(zip(grads, vae.trainable_weights, strict=True))
        loss_metric(loss)

    @nano
    def train(dataset):
        for _epoch in range(2):
            for number, x_batch_train in enumerate(dataset):
                train_step(x_batch_train)
                if number % 2 == 0:
                    shown.append(float(loss_metric.result()))

    train(tf.data.Dataset.from_tensor_slices(rows(50, 6)).shuffle(buffer_size=50).batch(16))
    return shown, loss_metric.result(), vae.get_weights()


@program
def vae_beta_schedule(nano: Any, step: Any) -> Any:
    """Tracks three losses and a beta that the loop raises (keras.io/examples/generative)."""

    @nano
    def train(x, epochs=3):
        encoder, decoder = mlp(5, 8, 4), mlp(2, 8, 5)
        beta = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        optimizer = tf.keras.optimizers.Adam(2e-3)
        trackers = {name: tf.keras.metrics.Mean(name=name) for name in ("total", "rec", "kl")}

        @step
        @tf.function
        def train_step(data):
            with tf.GradientTape() as tape:
                z_mean, z_log_var = tf.split(encoder(data), 2, axis=-1)
                noise = tf.random.normal(tf.shape(z_mean), dtype=tf.float64)
                reconstruction = decoder(z_mean + tf.exp(0.5 * z_log_var) * noise)
                rec = tf.reduce_mean(tf.reduce_sum(tf.square(data - reconstruction), axis=1))
                kl = -0.5 * (1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var))
                kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
                total = rec + beta * kl
            weights = encoder.trainable_weights + decoder.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
            trackers["total"].update_state(total)
            trackers["rec"].update_state(rec)
            trackers["kl"].update_state(kl)
            return {name: tracker.result() for name, tracker in trackers.items()}

        history = []
        for epoch in range(epochs):
            beta.assign(min(1.0, epoch / 2))
            for data in batches(x):
                logs = train_step(data)
            history.append({name: float(value) for name, value in logs.items()})
            for tracker in trackers.values():
                tracker.reset_state()
        return history, encoder.get_weights(), decoder.get_weights(), beta

    return train(rows(33, 5))


class VectorQuantizer(layers.Layer):
    """Replaces each vector by the nearest one of a codebook."""

    def __init__(self, num_embeddings: int, embedding_dim: int, beta: float = 0.25) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.beta = beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings),
            initializer=tf.keras.initializers.RandomUniform(-1.0, 1.0, seed=5),
            trainable=True,
            name="embeddings",
        )

    def call(self, x: Any) -> Any:
        input_shape = tf.shape(x)
        flattened = tf.reshape(x, [-1, self.embedding_dim])
        indices = self.get_code_indices(flattened)
        encodings = tf.one_hot(indices, self.num_embeddings, dtype=x.dtype)
        quantized = tf.matmul(encodings, self.embeddings, transpose_b=True)
        quantized = tf.reshape(quantized, input_shape)
        commitment_loss = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook_loss = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + tf.stop_gradient(quantized - x)

    def get_code_indices(self, flattened: Any) -> Any:
        similarity = tf.matmul(flattened, self.embeddings)
        distances = tf.reduce_sum(flattened**2, axis=1, keepdims=True)
        distances += tf.reduce_sum(self.embeddings**2, axis=0) - 2 * similarity
        return tf.argmin(distances, axis=1)


class VQVAETrainer(tf.keras.Model):
    """Holds the net, its loss metrics and a train_step."""

    def __init__(self, train_variance: float) -> None:
        super().__init__()
        self.train_variance = train_variance
        self.encoder = layers.Conv2D(3, 3, strides=2, padding="same", activation="tanh")
        self.quantizer = VectorQuantizer(5, 3)
        self.decoder = layers.Conv2DTranspose(1, 3, strides=2, padding="same")
        self.total_loss_tracker = tf.keras.metrics.Mean(name="total_loss")

    def call(self, x: Any) -> Any:
        return self.decoder(self.quantizer(self.encoder(x)))


@program
def vqvae(nano: Any, step: Any) -> Any:
    """Straight-through gradients past a codebook (keras.io/examples/generative/vq_vae)."""
    data = images(22) - 0.5
    trainer = VQVAETrainer(float(np.var(data)))
    optimizer = tf.keras.optimizers.Adam(5e-3)

    @step
    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            reconstructions = trainer(x)
            reconstruction_loss = tf.reduce_mean((x - reconstructions) ** 2)
            reconstruction_loss /= trainer.train_variance
            total_loss = reconstruction_loss + sum(trainer.losses)
        grads = tape.gradient(total_loss, trainer.trainable_variables)
        optimizer.apply_gradients(zip(grads, trainer.trainable_variables, strict=True))
        trainer.total_loss_tracker.update_state(total_loss)
        return reconstruction_loss

    @nano
    def train(dataset):
        losses = [train_step(x) for x in dataset]
        return losses, trainer.total_loss_tracker.result()

    return train(batches(data, size=8)), [w.numpy() for w in trainer.trainable_variables]


@program
def denoising_autoencoder(nano: Any, step: Any) -> Any:
    """Adds noise in the step; an evaluation adds its own (keras.io/examples/vision)."""
    autoencoder = mlp(6, 8, 3, 8, 6, activation="relu")
    optimizer = tf.keras.optimizers.Adam()

    @step
    @tf.function
    def train_step(clean):
        noisy = clean + 0.4 * tf.random.normal(tf.shape(clean), dtype=clean.dtype)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.keras.losses.mse(clean, autoencoder(noisy, training=True)))
        gradients = tape.gradient(loss, autoencoder.trainable_variables)
        optimizer.apply_gradients(zip(gradients, autoencoder.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, x_test):
        dataset = tf.data.Dataset.from_tensor_slices(x).batch(16)
        losses = {"train": [], "test": []}
        for _ in range(2):
            epoch_losses = [train_step(batch).numpy() for batch in dataset]
            losses["train"].append(np.mean(epoch_losses))
            noisy = x_test + 0.4 * np.random.normal(size=x_test.shape)
            restored = autoencoder(noisy)
            losses["test"].append(float(tf.reduce_mean((restored - x_test) ** 2)))
        return losses

    return train(rows(39, 6), rows(11, 6, seed=8)), autoencoder.get_weights()


@program
def sparse_autoencoder(nano: Any, step: Any) -> Any:
    """An activity regularizer on the code and a kernel regularizer on the decoder."""
    inputs = tf.keras.Input(shape=(7,))
    code = layers.Dense(5, activation="relu", activity_regularizer=tf.keras.regularizers.L1(1e-2))(
        inputs
    )
    outputs = layers.Dense(7, kernel_regularizer=tf.keras.regularizers.L2(1e-2))(code)
    model = tf.keras.Model(inputs, [outputs, code])
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    mse = tf.keras.losses.MeanSquaredError()

    @step
    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            restored, code = model(x, training=True)
            penalty = tf.add_n(model.losses)
            loss = mse(x, restored) + penalty
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        return loss, penalty, tf.reduce_mean(tf.cast(code > 0, tf.float64))

    @nano
    def loop(x, y_unused=None):
        return [train_step(batch) for batch in batches(x, size=10)]

    return loop(rows(34, 7)), model.get_weights()


@program
def contractive_autoencoder(nano: Any, step: Any) -> Any:
    """Penalizes the Jacobian of the code with respect to the input, from batch_jacobian."""
    encoder, decoder = mlp(4, 3, last="sigmoid"), mlp(3, 4)
    optimizer = tf.keras.optimizers.SGD(0.3)

    @step
    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                code = encoder(x)
            jacobian = inner.batch_jacobian(code, x)
            contraction = tf.reduce_sum(tf.square(jacobian)) / tf.cast(len(x), x.dtype)
            loss = tf.reduce_mean(tf.reduce_sum((decoder(code) - x) ** 2, axis=-1))
            total = loss + 0.1 * contraction
        variables = [*encoder.trainable_variables, *decoder.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
        return loss, contraction

    @nano
    def train(data):
        return [train_step(tf.convert_to_tensor(x)) for x in data.as_numpy_iterator()]

    return train(batches(rows(37))), encoder.get_weights(), decoder.get_weights()


@program
def masked_autoencoder(nano: Any, step: Any) -> Any:
    """Hides random patches of each image; the loss covers only these (keras.io, vision)."""
    PATCHES, PATCH, HIDDEN = 16, 4, 8
    mask_token = tf.Variable(tf.random.normal([PATCH], dtype=tf.float64))
    model = mlp(PATCHES * PATCH, 12, PATCHES * PATCH)
    optimizer = tf.keras.optimizers.Adam(1e-3)
    token_optimizer = tf.keras.optimizers.SGD(0.1)

    def patchify(pictures):
        patches = tf.image.extract_patches(
            pictures, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
        )
        return tf.reshape(patches, (-1, PATCHES, PATCH))

    @step
    @tf.function
    def train_step(pictures):
        patches = patchify(pictures)
        order = tf.argsort(tf.random.uniform((len(pictures), PATCHES), dtype=tf.float64))
        hidden = tf.reduce_sum(tf.one_hot(order[:, :HIDDEN], PATCHES, dtype=tf.float64), axis=1)
        hidden = hidden[:, :, None]
        with tf.GradientTape() as tape:
            seen = patches * (1 - hidden) + mask_token * hidden
            restored = model(tf.reshape(seen, (-1, PATCHES * PATCH)), training=True)
            error = tf.square(tf.reshape(restored, tf.shape(patches)) - patches) * hidden
            loss = tf.reduce_sum(error) / (tf.reduce_sum(hidden) * PATCH)
        *grads, grad = tape.gradient(loss, [*model.trainable_variables, mask_token])
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        token_optimizer.apply_gradients([(grad, mask_token)])
        return loss

    @nano
    def train(dataset):
        return [float(train_step(pictures)) for pictures in dataset]

    dataset = tf.data.Dataset.from_tensor_slices(images(26)).batch(10).prefetch(2)
    return train(dataset), mask_token, model.get_weights()
