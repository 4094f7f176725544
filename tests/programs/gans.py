"""Networks that train against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, images, labels, mlp, rows
from tensorflow.keras import layers


def _image_generator(noise: int = 6) -> Any:
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape=(noise,)),
            layers.Dense(2 * 2 * 6, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((2, 2, 6)),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
        ]
    )


def _image_critic(dropout: float = 0.0) -> Any:
    model = tf.keras.Sequential([tf.keras.Input(shape=(8, 8, 1))])
    for filters in (4, 6):
        model.add(layers.Conv2D(filters, 3, strides=2, padding="same"))
        model.add(layers.LeakyReLU())
        if dropout:
            model.add(layers.Dropout(dropout))
    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model


@program
def dcgan(nano: Any, step: Any) -> Any:
    """A convolutional GAN with noise of BATCH_SIZE rows (tensorflow.org/tutorials/generative)."""
    BATCH_SIZE = 10
    noise_dim = 6
    generator = _image_generator(noise_dim)
    discriminator = _image_critic(dropout=0.3)
    cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer = tf.keras.optimizers.Adam(1e-3)
    discriminator_optimizer = tf.keras.optimizers.Adam(1e-3)
    seed = tf.random.normal([4, noise_dim], dtype=tf.float64)

    def discriminator_loss(real_output, fake_output):
        real_loss = cross_entropy(tf.ones_like(real_output), real_output)
        fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
        return real_loss + fake_loss

    def generator_loss(fake_output):
        return cross_entropy(tf.ones_like(fake_output), fake_output)

    @step
    @tf.function
    def train_step(pictures):
        noise = tf.random.normal([BATCH_SIZE, noise_dim], dtype=tf.float64)
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated = generator(noise, training=True)
            real_output = discriminator(pictures, training=True)
            fake_output = discriminator(generated, training=True)
            gen_loss = generator_loss(fake_output)
            disc_loss = discriminator_loss(real_output, fake_output)
        gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
        disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        generator_optimizer.apply_gradients(
            zip(gen_gradients, generator.trainable_variables, strict=True)
        )
        discriminator_optimizer.apply_gradients(
            zip(disc_gradients, discriminator.trainable_variables, strict=True)
        )
        return gen_loss, disc_loss

    @nano
    def train(dataset, epochs):
        history = []
        for _ in range(epochs):
            for image_batch in dataset:
                history.append(train_step(image_batch))
        return history

    data = tf.data.Dataset.from_tensor_slices(images(30) * 2 - 1).shuffle(30).batch(BATCH_SIZE)
    history = train(data, 2)
    drawn = generator(seed, training=False)
    return history, drawn, generator.get_weights(), discriminator.get_weights()


@program
def wgan_gp(nano: Any, step: Any) -> Any:
    """A Wasserstein GAN with gradient penalty (keras.io/examples/generative/wgan_gp)."""
    generator = mlp(3, 8, 4)
    critic = mlp(4, 8, 1)
    g_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9)
    d_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9)

    def gradient_penalty(batch_size, real, fake):
        alpha = tf.random.normal([batch_size, 1], 0.0, 1.0, dtype=real.dtype)
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = critic(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    @step
    @tf.function
    def train_step(real):
        batch_size = tf.shape(real)[0]
        for _ in range(2):
            noise = tf.random.normal(shape=(batch_size, 3), dtype=tf.float64)
            with tf.GradientTape() as tape:
                fake = generator(noise, training=True)
                cost = tf.reduce_mean(critic(fake, training=True))
                cost -= tf.reduce_mean(critic(real, training=True))
                penalty = gradient_penalty(batch_size, real, fake)
                d_loss = cost + 10.0 * penalty
            gradient = tape.gradient(d_loss, critic.trainable_variables)
            d_optimizer.apply_gradients(zip(gradient, critic.trainable_variables, strict=True))
        noise = tf.random.normal(shape=(batch_size, 3), dtype=tf.float64)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(critic(generator(noise, training=True), training=True))
        gradient = tape.gradient(g_loss, generator.trainable_variables)
        g_optimizer.apply_gradients(zip(gradient, generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss, "penalty": penalty}

    @nano
    def train(real):
        logs = []
        for batch in real:
            logs.append(train_step(batch))
        return logs

    return train(batches(rows(37))), generator.get_weights(), critic.get_weights()


@program
def cyclegan(nano: Any, step: Any) -> Any:
    """Two generators and a persistent tape (tensorflow.org/tutorials/generative/cyclegan)."""
    LAMBDA = 10
    loss_obj = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    nets = {
        "g": mlp(5, 8, 5),
        "f": mlp(5, 8, 5),
        "x": mlp(5, 6, 1),
        "y": mlp(5, 6, 1),
    }
    opts = {name: tf.keras.optimizers.Adam(2e-3, beta_1=0.5) for name in nets}

    def discriminator_loss(real, generated):
        real_loss = loss_obj(tf.ones_like(real), real)
        generated_loss = loss_obj(tf.zeros_like(generated), generated)
        return (real_loss + generated_loss) * 0.5

    def generator_loss(generated):
        return loss_obj(tf.ones_like(generated), generated)

    def calc_cycle_loss(real_image, cycled_image):
        return LAMBDA * tf.reduce_mean(tf.abs(real_image - cycled_image))

    def identity_loss(real_image, same_image):
        return LAMBDA * 0.5 * tf.reduce_mean(tf.abs(real_image - same_image))

    @step
    @tf.function
    def train_step(real_x, real_y):
        with tf.GradientTape(persistent=True) as tape:
            fake_y = nets["g"](real_x, training=True)
            cycled_x = nets["f"](fake_y, training=True)
            fake_x = nets["f"](real_y, training=True)
            cycled_y = nets["g"](fake_x, training=True)
            same_x = nets["f"](real_x, training=True)
            same_y = nets["g"](real_y, training=True)
            disc_real_x = nets["x"](real_x, training=True)
            disc_real_y = nets["y"](real_y, training=True)
            disc_fake_x = nets["x"](fake_x, training=True)
            disc_fake_y = nets["y"](fake_y, training=True)
            total_cycle = calc_cycle_loss(real_x, cycled_x) + calc_cycle_loss(real_y, cycled_y)
            losses = {
                "g": generator_loss(disc_fake_y) + total_cycle + identity_loss(real_y, same_y),
                "f": generator_loss(disc_fake_x) + total_cycle + identity_loss(real_x, same_x),
                "x": discriminator_loss(disc_real_x, disc_fake_x),
                "y": discriminator_loss(disc_real_y, disc_fake_y),
            }
        for name, loss in losses.items():
            variables = nets[name].trainable_variables
            gradients = tape.gradient(loss, variables)
            opts[name].apply_gradients(zip(gradients, variables, strict=True))
        return losses

    @nano
    def train(first, second, epochs=2):
        seen = 0
        history = []
        for _ in range(epochs):
            for image_x, image_y in tf.data.Dataset.zip((first, second)):
                history.append(train_step(image_x, image_y))
                seen += 1
        return history, seen

    result = train(batches(rows(25, 5), size=10), batches(rows(25, 5, seed=9) + 1, size=10))
    return result, {name: net.get_weights() for name, net in nets.items()}


class ConditionalGAN(tf.keras.Model):
    """A GAN conditioned on the class, with train_step as its own method."""

    def __init__(self, classes: int, latent: int) -> None:
        super().__init__()
        self.classes = classes
        self.latent = latent
        self.generator = mlp(latent + classes, 10, 4)
        self.discriminator = mlp(4 + classes, 10, 1)
        self.gen_loss_tracker = tf.keras.metrics.Mean(name="generator_loss")
        self.disc_loss_tracker = tf.keras.metrics.Mean(name="discriminator_loss")

    @property
    def metrics(self) -> Any:
        return [self.gen_loss_tracker, self.disc_loss_tracker]


@program
def conditional_gan(nano: Any, step: Any) -> Any:
    """Class labels for both nets and noisy smoothed labels (keras.io/examples/generative)."""
    gan = ConditionalGAN(classes=3, latent=4)
    d_optimizer = tf.keras.optimizers.Adam(3e-3)
    g_optimizer = tf.keras.optimizers.Adam(3e-3)
    loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1)

    @step
    @tf.function
    def train_step(real, one_hot_labels):
        batch_size = tf.shape(real)[0]
        latent = tf.random.normal(shape=(batch_size, gan.latent), dtype=tf.float64)
        generated = gan.generator(tf.concat([latent, one_hot_labels], axis=1))
        fake = tf.concat([generated, one_hot_labels], -1)
        true = tf.concat([real, one_hot_labels], -1)
        combined = tf.concat([fake, true], axis=0)
        ones = tf.ones((batch_size, 1), dtype=tf.float64)
        answers = tf.concat([ones, tf.zeros((batch_size, 1), dtype=tf.float64)], axis=0)
        answers += 0.05 * tf.random.uniform(tf.shape(answers), dtype=tf.float64)
        with tf.GradientTape() as tape:
            d_loss = loss_fn(answers, gan.discriminator(combined))
        weights = gan.discriminator.trainable_weights
        d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        latent = tf.random.normal(shape=(batch_size, gan.latent), dtype=tf.float64)
        misleading = tf.zeros((batch_size, 1), dtype=tf.float64)
        with tf.GradientTape() as tape:
            fake = gan.generator(tf.concat([latent, one_hot_labels], axis=1))
            predictions = gan.discriminator(tf.concat([fake, one_hot_labels], -1))
            g_loss = loss_fn(misleading, predictions)
        weights = gan.generator.trainable_weights
        g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        gan.gen_loss_tracker.update_state(g_loss)
        gan.disc_loss_tracker.update_state(d_loss)
        return {m.name: m.result() for m in gan.metrics}

    @nano
    def train(x, y):
        logs = []
        for epoch in range(2):
            data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=epoch).batch(14)
            for metric in gan.metrics:
                metric.reset_state()
            for real, one_hot in data:
                last = train_step(real, one_hot)
            logs.append({name: float(value) for name, value in last.items()})
        return logs

    logs = train(rows(33), np.eye(3)[labels(33)])
    return logs, gan.generator.get_weights(), gan.discriminator.get_weights()


@program
def pix2pix(nano: Any, step: Any) -> Any:
    """Image to image with skips, concatenated inputs and an L1 term (tutorials/generative)."""
    source = tf.keras.Input(shape=(8, 8, 1))
    down1 = layers.LeakyReLU()(layers.Conv2D(4, 4, strides=2, padding="same")(source))
    down2 = layers.Conv2D(6, 4, strides=2, padding="same", use_bias=False)(down1)
    down2 = layers.LeakyReLU()(layers.BatchNormalization()(down2))
    up = layers.Conv2DTranspose(4, 4, strides=2, padding="same")(down2)
    up = layers.ReLU()(layers.Dropout(0.5)(up))
    up = layers.Concatenate()([up, down1])
    picture = layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh")(up)
    generator = tf.keras.Model(source, picture)
    first, second = tf.keras.Input(shape=(8, 8, 1)), tf.keras.Input(shape=(8, 8, 1))
    patch = layers.Conv2D(4, 4, strides=2, padding="same")(layers.concatenate([first, second]))
    patch = layers.Conv2D(1, 2)(layers.LeakyReLU()(layers.ZeroPadding2D()(patch)))
    discriminator = tf.keras.Model([first, second], patch)
    loss_object = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer = tf.keras.optimizers.Adam(2e-3, beta_1=0.5)
    discriminator_optimizer = tf.keras.optimizers.Adam(2e-3, beta_1=0.5)

    @step
    @tf.function
    def train_step(input_image, target):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            gen_output = generator(input_image, training=True)
            real = discriminator([input_image, target], training=True)
            generated = discriminator([input_image, gen_output], training=True)
            gan_loss = loss_object(tf.ones_like(generated), generated)
            l1_loss = tf.reduce_mean(tf.abs(target - gen_output))
            total = gan_loss + 100 * l1_loss
            disc_loss = loss_object(tf.ones_like(real), real)
            disc_loss += loss_object(tf.zeros_like(generated), generated)
        grads = gen_tape.gradient(total, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(grads, generator.trainable_variables, strict=True))
        grads = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        discriminator_optimizer.apply_gradients(
            zip(grads, discriminator.trainable_variables, strict=True)
        )
        return total, gan_loss, l1_loss, disc_loss

    @nano
    def fit(train_ds, steps):
        shown = []
        for number, (input_image, target) in train_ds.repeat().take(steps).enumerate():
            values = train_step(input_image, target)
            if (number + 1) % 2 == 0:
                shown.append([float(value) for value in values])
        return shown

    inputs = images(14)
    shown = fit(batches(inputs, np.flip(inputs, axis=2).copy(), size=5), 6)
    return shown, generator.get_weights(), discriminator.get_weights()


@program
def wgan_weight_clipping(nano: Any, step: Any) -> Any:
    """The first Wasserstein GAN: RMSprop, several critic steps, weights clipped after each."""
    CLIP = 0.05
    generator = mlp(2, 8, 3, activation="relu")
    critic = mlp(3, 8, 1, activation="relu")
    g_opt = tf.keras.optimizers.RMSprop(1e-3)
    c_opt = tf.keras.optimizers.RMSprop(1e-3)

    @step
    @tf.function
    def critic_step(real):
        noise = tf.random.uniform((len(real), 2), -1.0, 1.0, dtype=real.dtype)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(critic(generator(noise))) - tf.reduce_mean(critic(real))
        grads = tape.gradient(loss, critic.trainable_variables)
        c_opt.apply_gradients(zip(grads, critic.trainable_variables, strict=True))
        for weight in critic.trainable_variables:
            weight.assign(tf.clip_by_value(weight, -CLIP, CLIP))
        return loss

    @step
    @tf.function
    def generator_step(count):
        noise = tf.random.uniform((count, 2), -1.0, 1.0, dtype=tf.float64)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise)))
        grads = tape.gradient(loss, generator.trainable_variables)
        g_opt.apply_gradients(zip(grads, generator.trainable_variables, strict=True))
        return loss

    @nano
    def train(data):
        critic_losses, generator_losses = [], []
        for number, batch in enumerate(data):
            critic_losses.append(critic_step(batch).numpy())
            if number % 2 == 1:
                generator_losses.append(generator_step(12).numpy())
        return critic_losses, generator_losses

    data = batches(rows(64, 3), size=12)
    return train(data), generator.get_weights(), critic.get_weights()


@program
def hinge_gan_with_average(nano: Any, step: Any) -> Any:
    """Hinge losses, spectral normalization, and a moving average of the generator's weights."""

    def build():
        critic = tf.keras.Sequential(
            [
                tf.keras.Input(shape=(4,)),
                layers.SpectralNormalization(layers.Dense(8, activation="tanh")),
                layers.SpectralNormalization(layers.Dense(1)),
            ]
        )
        return mlp(3, 8, 4), mlp(3, 8, 4), critic

    @nano
    def train(x):
        generator, average, critic = build()
        average.set_weights(generator.get_weights())
        g_opt = tf.keras.optimizers.Adam(2e-3, beta_1=0.0)
        d_opt = tf.keras.optimizers.Adam(4e-3, beta_1=0.0)

        @step
        @tf.function
        def discriminate(real, noise):
            with tf.GradientTape() as tape:
                fake = tf.stop_gradient(generator(noise, training=True))
                loss = tf.reduce_mean(tf.nn.relu(1.0 - critic(real, training=True)))
                loss += tf.reduce_mean(tf.nn.relu(1.0 + critic(fake, training=True)))
            grads = tape.gradient(loss, critic.trainable_variables)
            d_opt.apply_gradients(zip(grads, critic.trainable_variables, strict=True))
            return loss

        @step
        @tf.function
        def generate(noise):
            with tf.GradientTape() as tape:
                loss = -tf.reduce_mean(critic(generator(noise, training=True), training=False))
            grads = tape.gradient(loss, generator.trainable_variables)
            g_opt.apply_gradients(zip(grads, generator.trainable_variables, strict=True))
            for slow, fast in zip(average.variables, generator.variables, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return loss

        log = {"d": [], "g": []}
        for real in tf.data.Dataset.from_tensor_slices(x).batch(16):
            noise = np.random.normal(size=(len(real), 3))
            log["d"].append(discriminate(real, noise))
            log["g"].append(generate(tf.constant(noise)))
        return log, generator.get_weights(), average.get_weights(), critic.get_weights()

    return train(rows(40))
