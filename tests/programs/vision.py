"""Images: attacks, mixtures, masks, styles and explanations."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, images, labels, mlp, rows
from tensorflow.keras import layers


def _classifier(classes: int = 3, channels: int = 1) -> Any:
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, channels)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(classes),
        ]
    )


@program
def quickstart_expert(nano: Any, step: Any) -> Any:
    """Train and test steps with four metrics (tensorflow.org/tutorials/quickstart/advanced)."""

    class MyModel(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.conv1 = layers.Conv2D(4, 3, activation="relu")
            self.flatten = layers.Flatten()
            self.d1 = layers.Dense(8, activation="relu")
            self.d2 = layers.Dense(3)

        def call(self, x):
            x = self.conv1(x)
            x = self.flatten(x)
            x = self.d1(x)
            return self.d2(x)

    model = MyModel()
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam()
    train_loss = tf.keras.metrics.Mean(name="train_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    @step
    @tf.function
    def train_step(pictures, answers):
        with tf.GradientTape() as tape:
            predictions = model(pictures, training=True)
            loss = loss_object(answers, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_loss(loss)
        train_accuracy(answers, predictions)

    @step
    @tf.function
    def test_step(pictures, answers):
        predictions = model(pictures, training=False)
        t_loss = loss_object(answers, predictions)
        test_loss(t_loss)
        test_accuracy(answers, predictions)

    @nano
    def train(train_ds, test_ds):
        shown = []
        for _epoch in range(2):
            for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
                metric.reset_state()
            for pictures, answers in train_ds:
                train_step(pictures, answers)
            for test_pictures, test_answers in test_ds:
                test_step(test_pictures, test_answers)
            shown.append(
                [
                    train_loss.result(),
                    train_accuracy.result() * 100,
                    test_loss.result(),
                    test_accuracy.result() * 100,
                ]
            )
        return shown

    train_ds = tf.data.Dataset.from_tensor_slices((images(35), labels(35))).shuffle(100).batch(16)
    test_ds = tf.data.Dataset.from_tensor_slices((images(13, seed=4), labels(13))).batch(16)
    return train(train_ds, test_ds), model.get_weights()


@program
def fgsm_training(nano: Any, step: Any) -> Any:
    """Adversarial examples from the sign of the gradient, clean and attacked losses added."""
    model = _classifier()
    loss_object = tf.keras.losses.CategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(0.05)
    epsilon = 0.1

    def create_adversarial_pattern(pictures, answers):
        with tf.GradientTape() as tape:
            tape.watch(pictures)
            loss = loss_object(answers, model(pictures, training=False))
        return tf.sign(tape.gradient(loss, pictures))

    @step
    @tf.function
    def train_step(pictures, answers):
        attacked = pictures + epsilon * create_adversarial_pattern(pictures, answers)
        attacked = tf.clip_by_value(attacked, 0, 1)
        with tf.GradientTape() as tape:
            clean_loss = loss_object(answers, model(pictures, training=True))
            adversarial_loss = loss_object(answers, model(attacked, training=True))
            loss = 0.5 * clean_loss + 0.5 * adversarial_loss
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return clean_loss, adversarial_loss

    @nano
    def train(dataset):
        return [train_step(*batch) for batch in dataset]

    return train(batches(images(28), np.eye(3)[labels(28)], size=11)), model.get_weights()


@program
def pgd_attack(nano: Any, step: Any) -> Any:
    """Attacks in several steps of a tf.while loop from a random start; returns only the gap."""
    model = _classifier()
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    optimizer = tf.keras.optimizers.Adam(2e-3)

    @tf.function
    def attack(x, y):
        delta = tf.random.uniform(tf.shape(x), -0.05, 0.05, dtype=x.dtype)
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                tape.watch(delta)
                loss = tf.reduce_sum(loss_fn(y, model(x + delta)))
            gradient = tape.gradient(loss, delta)
            norm = tf.sqrt(tf.reduce_sum(gradient**2, axis=[1, 2, 3], keepdims=True))
            delta = tf.clip_by_value(delta + 0.05 * gradient / (norm + 1e-9), -0.05, 0.05)
        return x + delta

    @step
    @tf.function
    def train_step(x, y):
        attacked = tf.stop_gradient(attack(x, y))
        with tf.GradientTape() as tape:
            losses = loss_fn(y, model(attacked, training=True))
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss, losses

    @nano
    def train(dataset):
        losses, each = [], []
        for x, y in dataset:
            loss, per_example = train_step(x, y)
            losses.append(loss)
            each.extend(per_example.numpy().tolist())
        return losses, each

    return train(batches(images(24), labels(24), size=10)), model.get_weights()


@program
def mixup(nano: Any, step: Any) -> Any:
    """Rows mixed with shuffled rows of the same batch by gamma samples (keras.io, mixup)."""
    model = _classifier()
    optimizer = tf.keras.optimizers.Adam()
    loss_fn = tf.keras.losses.CategoricalCrossentropy(from_logits=True)

    def sample_beta(size, c0=0.4, c1=0.4):
        gamma_1 = tf.random.gamma(shape=[size], alpha=c1, dtype=tf.float64)
        gamma_2 = tf.random.gamma(shape=[size], alpha=c0, dtype=tf.float64)
        return gamma_1 / (gamma_1 + gamma_2)

    @step
    @tf.function
    def train_step(pictures, answers):
        batch_size = tf.shape(pictures)[0]
        order = tf.random.shuffle(tf.range(batch_size))
        share = sample_beta(batch_size)
        x_share = tf.reshape(share, (batch_size, 1, 1, 1))
        y_share = tf.reshape(share, (batch_size, 1))
        x = pictures * x_share + tf.gather(pictures, order) * (1 - x_share)
        y = answers * y_share + tf.gather(answers, order) * (1 - y_share)
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        return [float(train_step(pictures, answers)) for pictures, answers in dataset]

    return train(batches(images(35), np.eye(3)[labels(35)])), model.get_weights()


@program
def cutmix(nano: Any, step: Any) -> Any:
    """Replaces a box of each image by another dataset's image; NumPy draws the boxes."""
    model = _classifier()
    optimizer = tf.keras.optimizers.RMSprop(1e-3)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    def mix(one, two):
        (image1, label1), (image2, label2) = one, two
        side = np.random.randint(2, 6)
        top, left = np.random.randint(0, 8 - side, size=2)
        mask = np.zeros((1, 8, 8, 1))
        mask[:, top : top + side, left : left + side] = 1.0
        share = 1 - side * side / 64
        return image1 * (1 - mask) + image2 * mask, share * label1 + (1 - share) * label2

    @nano
    def train(first, second):
        losses = []
        for one, two in tf.data.Dataset.zip((first, second)):
            losses.append(train_step(*mix(one, two)))
        return losses

    data = tf.data.Dataset.from_tensor_slices((images(26), np.eye(3)[labels(26)]))
    first, second = data.shuffle(64, seed=1).batch(9), data.shuffle(64, seed=2).batch(9)
    return train(first, second), model.get_weights()


@program
def focal_loss(nano: Any, step: Any) -> Any:
    """A focal loss as a Loss class with call, summed and divided by the positives."""

    class FocalLoss(tf.keras.losses.Loss):
        def __init__(self, alpha=0.25, gamma=2.0):
            super().__init__(reduction="none", name="FocalLoss")
            self._alpha = alpha
            self._gamma = gamma

        def call(self, y_true, y_pred):
            cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred)
            probs = tf.nn.sigmoid(y_pred)
            alpha = tf.where(tf.equal(y_true, 1.0), self._alpha, 1.0 - self._alpha)
            pt = tf.where(tf.equal(y_true, 1.0), probs, 1 - probs)
            loss = tf.cast(alpha, pt.dtype) * tf.pow(1.0 - pt, self._gamma) * cross_entropy
            return tf.reduce_sum(loss, axis=-1)

    model = mlp(5, 8, 3)
    focal = FocalLoss()
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = focal(y, model(x, training=True))
            normalizer = tf.maximum(tf.reduce_sum(y), 1.0)
            loss = tf.reduce_sum(loss) / normalizer
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        return [train_step(x, y) for x, y in dataset]

    return train(batches(rows(37, 5), np.eye(3)[labels(37)])), model.get_weights()


@program
def dice_segmentation(nano: Any, step: Any) -> Any:
    """Soft Dice over the batch and the counts behind mean IoU, a small U-shaped net."""
    inputs = tf.keras.Input(shape=(8, 8, 1))
    down = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    middle = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(down)
    up = layers.UpSampling2D()(middle)
    outputs = layers.Conv2D(2, 3, padding="same")(layers.Concatenate()([up, down]))
    model = tf.keras.Model(inputs, outputs)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    iou = tf.keras.metrics.MeanIoU(num_classes=2)

    def dice_loss(y_true, y_pred, smooth=1.0):
        y_true = tf.one_hot(y_true, 2, dtype=y_pred.dtype)
        intersection = tf.reduce_sum(y_true * y_pred, axis=[0, 1, 2])
        union = tf.reduce_sum(y_true, axis=[0, 1, 2]) + tf.reduce_sum(y_pred, axis=[0, 1, 2])
        return 1 - tf.reduce_mean((2.0 * intersection + smooth) / (union + smooth))

    @step
    @tf.function
    def train_step(pictures, masks):
        with tf.GradientTape() as tape:
            logits = model(pictures, training=True)
            loss = dice_loss(masks, tf.nn.softmax(logits))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        iou.update_state(masks, tf.argmax(logits, axis=-1))
        return loss

    @nano
    def train(pictures, masks):
        losses, ious = [], []
        for _epoch in range(2):
            iou.reset_state()
            for batch in batches(pictures, masks, size=9):
                losses.append(train_step(*batch).numpy())
            ious.append(np.array(iou.total_cm))
        return losses, ious

    pictures = images(21)
    masks = (pictures[..., 0] > 0.5).astype("int64")
    return train(pictures, masks), model.get_weights()


@program
def style_transfer(nano: Any, step: Any) -> Any:
    """Optimizes one image against gram matrices of a fixed net, without a dataset."""
    net_input = tf.keras.Input(shape=(8, 8, 3))
    first = layers.Conv2D(4, 3, activation="tanh", name="first")(net_input)
    second = layers.Conv2D(5, 3, activation="tanh", name="second")(first)
    extractor = tf.keras.Model(net_input, [first, second])
    extractor.trainable = False

    def gram_matrix(features):
        result = tf.linalg.einsum("bijc,bijd->bcd", features, features)
        shape = tf.shape(features)
        return result / tf.cast(shape[1] * shape[2], features.dtype)

    content_image, style_image = images(1, 8, 3, seed=1), images(1, 8, 3, seed=2)
    style_targets = [gram_matrix(features) for features in extractor(style_image)]
    content_target = extractor(content_image)[1]
    opt = tf.keras.optimizers.Adam(learning_rate=0.02, beta_1=0.99, epsilon=1e-1)

    @step
    @tf.function
    def train_step(image):
        with tf.GradientTape() as tape:
            outputs = extractor(image)
            style_loss = tf.add_n(
                [
                    tf.reduce_mean((gram_matrix(output) - target) ** 2)
                    for output, target in zip(outputs, style_targets, strict=True)
                ]
            )
            content_loss = tf.reduce_mean((outputs[1] - content_target) ** 2)
            loss = (
                style_loss
                + 0.1 * content_loss
                + 1e-3 * tf.reduce_sum(tf.image.total_variation(image))
            )
        grad = tape.gradient(loss, image)
        opt.apply_gradients([(grad, image)])
        image.assign(tf.clip_by_value(image, clip_value_min=0.0, clip_value_max=1.0))
        return loss

    @nano
    def train(steps):
        image = tf.Variable(content_image)
        losses = [train_step(image) for _ in range(steps)]
        return losses, image

    return train(4)


@program
def deep_dream(nano: Any, step: Any) -> Any:
    """Ascends the gradient on the image inside a tf.range loop (tutorials/generative/deepdream)."""
    base = _classifier(channels=3)
    outputs = [base.layers[0].output, base.layers[1].output]
    dream_model = tf.keras.Model(inputs=base.inputs, outputs=outputs)

    def calc_loss(img, model):
        activations = model(tf.expand_dims(img, axis=0))
        return tf.reduce_sum([tf.math.reduce_mean(activation) for activation in activations])

    class DeepDream(tf.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        @tf.function(
            input_signature=(
                tf.TensorSpec(shape=[None, None, 3], dtype=tf.float64),
                tf.TensorSpec(shape=[], dtype=tf.int32),
                tf.TensorSpec(shape=[], dtype=tf.float64),
            )
        )
        def __call__(self, img, steps, step_size):
            loss = tf.constant(0.0, tf.float64)
            for _ in tf.range(steps):
                with tf.GradientTape() as tape:
                    tape.watch(img)
                    loss = calc_loss(img, self.model)
                gradients = tape.gradient(loss, img)
                gradients /= tf.math.reduce_std(gradients) + 1e-8
                img = img + gradients * step_size
                img = tf.clip_by_value(img, -1, 1)
            return loss, img

    deepdream = DeepDream(dream_model)

    @nano
    def run_deep_dream(img, steps, step_size):
        img = tf.convert_to_tensor(img)
        steps_remaining, losses = steps, []
        while steps_remaining:
            run_steps = tf.constant(min(2, steps_remaining))
            steps_remaining -= int(run_steps)
            loss, img = deepdream(img, run_steps, tf.constant(step_size, tf.float64))
            losses.append(loss)
        return losses, img

    return run_deep_dream(images(1, 8, 3)[0] * 2 - 1, 5, 0.01)


@program
def grad_cam(nano: Any, step: Any) -> Any:
    """Weighs a convolution's channels by gradients of its output, after training."""
    inputs = tf.keras.Input(shape=(8, 8, 1))
    conv = layers.Conv2D(5, 3, activation="relu", name="last_conv")(inputs)
    outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(conv))
    model = tf.keras.Model(inputs, outputs)
    grad_model = tf.keras.models.Model(
        model.inputs, [model.get_layer("last_conv").output, model.output]
    )
    optimizer = tf.keras.optimizers.Adam(5e-3)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    def make_heatmap(picture):
        with tf.GradientTape() as tape:
            last_conv_layer_output, preds = grad_model(picture)
            class_channel = preds[:, 1]
        grads = tape.gradient(class_channel, last_conv_layer_output)
        pooled_grads = tf.reduce_mean(grads, axis=(0, 1, 2))
        heatmap = last_conv_layer_output[0] @ pooled_grads[..., tf.newaxis]
        return tf.nn.softplus(tf.squeeze(heatmap))

    @nano
    def train(dataset):
        losses, maps = [], []
        for x, y in dataset:
            losses.append(train_step(x, y))
            maps.append(make_heatmap(x[:1]).numpy())
        return losses, np.stack(maps)

    return train(batches(images(22), labels(22), size=8)), model.get_weights()


@program
def integrated_gradients(nano: Any, step: Any) -> Any:
    """A regularizer on attributions: gradients at points between a baseline and the input."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.SGD(0.05)
    alphas = tf.linspace(tf.constant(0.0, tf.float64), tf.constant(1.0, tf.float64), 5)

    def attributions(x):
        path = alphas[:, None, None] * x[None]
        flat = tf.reshape(path, (-1, 4))
        with tf.GradientTape() as tape:
            tape.watch(flat)
            out = model(flat)
        grads = tf.reshape(tape.gradient(out, flat), tf.shape(path))
        return x * tf.reduce_mean((grads[:-1] + grads[1:]) / 2.0, axis=0)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            importance = attributions(x)
            error = tf.reduce_mean(tf.square(model(x) - y))
            loss = error + 0.1 * tf.reduce_mean(tf.reduce_sum(importance**2, axis=1))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return {"loss": loss, "importance": tf.reduce_mean(importance, axis=0)}

    @nano
    def train(x, y):
        return [train_step(*batch) for batch in batches(x, y)]

    x = rows(35)
    return train(x, np.sin(x[:, :1])), model.get_weights()


@program
def fine_tuning(nano: Any, step: Any) -> Any:
    """Freezes a base with batch norm, then trains it at a smaller rate (transfer_learning)."""
    base = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    )
    head = tf.keras.Sequential([tf.keras.Input(shape=(3, 3, 4)), layers.Flatten(), layers.Dense(1)])
    loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    def make_step(optimizer, variables, training):
        @step
        @tf.function
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, head(base(x, training=training), training=True))
            grads = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return loss

        return train_step

    @nano
    def train(dataset):
        base.trainable = False
        first = make_step(tf.keras.optimizers.Adam(1e-2), head.trainable_variables, False)
        losses = [first(x, y) for x, y in dataset]
        base.trainable = True
        variables = base.trainable_variables + head.trainable_variables
        second = make_step(tf.keras.optimizers.Adam(1e-3), variables, True)
        return losses, [second(x, y) for x, y in dataset]

    answers = labels(31, 2).astype("float64")[:, None]
    losses = train(batches(images(31), answers, size=12))
    return losses, base.get_weights(), head.get_weights()


@program
def augmented_residual_net(nano: Any, step: Any) -> Any:
    """Flips in the dataset, a residual block with group normalization and channel weights."""

    class Residual(layers.Layer):
        def __init__(self, filters):
            super().__init__()
            self.conv1 = layers.Conv2D(filters, 3, padding="same")
            self.norm1 = layers.GroupNormalization(groups=2)
            self.conv2 = layers.Conv2D(filters, 3, padding="same")
            self.norm2 = layers.GroupNormalization(groups=2)
            self.squeeze = layers.Dense(filters, activation="sigmoid")

        def call(self, x):
            y = tf.nn.relu(self.norm1(self.conv1(x)))
            y = self.norm2(self.conv2(y))
            weights = self.squeeze(tf.reduce_mean(y, axis=[1, 2]))
            return tf.nn.relu(x + y * weights[:, None, None, :])

    class Net(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.stem = layers.Conv2D(4, 3, strides=2)
            self.block = Residual(4)
            self.head = layers.Dense(3)

        def call(self, x):
            x = self.block(self.stem(x))
            return self.head(tf.reduce_mean(x, axis=[1, 2]))

    def augment(picture, answer):
        picture = tf.image.random_flip_left_right(picture, seed=1)
        return tf.image.rot90(picture), answer

    @nano
    def train(x, y):
        net, optimizer = Net(), tf.keras.optimizers.Adam(3e-3)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(augment).batch(12)
        losses = []

        @step
        @tf.function
        def train_step(pictures, answers):
            with tf.GradientTape() as tape:
                logits = net(pictures, training=True)
                smooth = tf.one_hot(answers, 3, dtype=logits.dtype) * 0.9 + 0.1 / 3
                loss = tf.nn.softmax_cross_entropy_with_logits(smooth, logits)
                loss = tf.reduce_sum(loss) / 12
            grads = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
            return loss

        for pictures, answers in dataset:
            losses.append(train_step(pictures, answers))
        return losses, [v.numpy() for v in net.trainable_variables]

    return train(images(28), labels(28))
