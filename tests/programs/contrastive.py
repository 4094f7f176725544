"""Representations learned by comparing rows of a batch with one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, mlp, rows
from tensorflow.keras import layers


@program
def simclr(nano: Any, step: Any) -> Any:
    """Two noisy views, similarities over the batch, and a linear probe (keras.io, SimCLR)."""
    temperature = 0.1
    encoder, projection_head, linear_probe = mlp(6, 10, 8), mlp(8, 8, 5), mlp(8, 3)
    contrastive_optimizer = tf.keras.optimizers.Adam()
    probe_optimizer = tf.keras.optimizers.Adam()
    probe_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    contrastive_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="c_acc")
    probe_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    def augment(x):
        return x * tf.random.uniform(tf.shape(x), 0.7, 1.3, dtype=x.dtype)

    def contrastive_loss(projections_1, projections_2):
        projections_1 = tf.math.l2_normalize(projections_1, axis=1)
        projections_2 = tf.math.l2_normalize(projections_2, axis=1)
        similarities = tf.matmul(projections_1, projections_2, transpose_b=True) / temperature
        batch_size = tf.shape(projections_1)[0]
        contrastive_labels = tf.range(batch_size)
        contrastive_accuracy.update_state(contrastive_labels, similarities)
        contrastive_accuracy.update_state(contrastive_labels, tf.transpose(similarities))
        loss_1_2 = tf.keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, similarities, from_logits=True
        )
        loss_2_1 = tf.keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, tf.transpose(similarities), from_logits=True
        )
        return tf.reduce_mean(loss_1_2 + loss_2_1) / 2

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            features_1 = encoder(augment(x), training=True)
            features_2 = encoder(augment(x), training=True)
            loss = contrastive_loss(projection_head(features_1), projection_head(features_2))
        weights = encoder.trainable_weights + projection_head.trainable_weights
        contrastive_optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        with tf.GradientTape() as tape:
            class_logits = linear_probe(encoder(x, training=False), training=True)
            p_loss = probe_loss(y, class_logits)
        weights = linear_probe.trainable_weights
        probe_optimizer.apply_gradients(zip(tape.gradient(p_loss, weights), weights, strict=True))
        probe_accuracy.update_state(y, class_logits)
        return loss, p_loss

    @nano
    def train(dataset):
        losses = [train_step(x, y) for x, y in dataset]
        return losses, contrastive_accuracy.result(), probe_accuracy.result()

    data = tf.data.Dataset.from_tensor_slices((rows(41, 6), labels(41))).batch(16)
    return train(data), encoder.get_weights(), linear_probe.get_weights()


class SupervisedContrastiveLoss(tf.keras.losses.Loss):
    """A loss that overrides __call__ and compares the rows with each other."""

    def __init__(self, temperature: float = 1, name: Any = None) -> None:
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels: Any, feature_vectors: Any, sample_weight: Any = None) -> Any:
        normalized = tf.math.l2_normalize(feature_vectors, axis=1)
        logits = tf.matmul(normalized, tf.transpose(normalized)) / self.temperature
        labels = tf.reshape(labels, [-1, 1])
        same = tf.cast(tf.equal(labels, tf.transpose(labels)), logits.dtype)
        same -= tf.eye(tf.shape(labels)[0], dtype=logits.dtype)
        same /= tf.maximum(tf.reduce_sum(same, axis=1, keepdims=True), 1.0)
        log_prob = logits - tf.reduce_logsumexp(logits, axis=1, keepdims=True)
        return -tf.reduce_mean(tf.reduce_sum(same * log_prob, axis=1))


@program
def supervised_contrastive(nano: Any, step: Any) -> Any:
    """Pretraining with a Loss that has its own __call__, then a classifier on frozen features."""
    encoder = mlp(5, 10, 6, activation="relu")
    classifier = mlp(6, 3)
    loss_fn = SupervisedContrastiveLoss(0.5)
    optimizer = tf.keras.optimizers.Adam(2e-3)
    head_optimizer = tf.keras.optimizers.Adam(2e-2)
    head_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @step
    @tf.function
    def pretrain_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, encoder(x, training=True))
        grads = tape.gradient(loss, encoder.trainable_variables)
        optimizer.apply_gradients(zip(grads, encoder.trainable_variables, strict=True))
        return loss

    @step
    @tf.function
    def head_step(x, y):
        features = encoder(x, training=False)
        with tf.GradientTape() as tape:
            loss = head_loss(y, classifier(features, training=True))
        grads = tape.gradient(loss, classifier.trainable_variables)
        head_optimizer.apply_gradients(zip(grads, classifier.trainable_variables, strict=True))
        return loss

    @nano
    def train(data):
        first = [pretrain_step(x, y) for x, y in data]
        encoder.trainable = False
        second = [head_step(x, y) for x, y in data]
        return first, second

    losses = train(batches(rows(45, 5), labels(45)))
    return losses, encoder.get_weights(), classifier.get_weights()


@program
def triplet_batch_mining(nano: Any, step: Any) -> Any:
    """Mines the hardest positives and negatives of the batch from all distances."""
    model = mlp(5, 8, 3)
    optimizer = tf.keras.optimizers.SGD(0.05)
    margin = 0.5

    def batch_hard_loss(y, embeddings):
        difference = embeddings[:, None, :] - embeddings[None, :, :]
        distances = tf.sqrt(tf.reduce_sum(difference**2, axis=-1) + 1e-6)
        same = tf.equal(y[:, None], y[None, :])
        furthest = tf.reduce_max(tf.where(same, distances, tf.zeros_like(distances)), axis=1)
        closest = tf.reduce_min(tf.where(same, distances + 100.0, distances), axis=1)
        return tf.reduce_mean(tf.nn.softplus(furthest - closest + margin))

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = batch_hard_loss(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        total, count = 0.0, 0
        for x, y in dataset:
            total += float(train_step(x, y)) * len(x)
            count += len(x)
        return total / count

    data = batches(rows(37, 5), labels(37))
    return train(data), model.get_weights()


class DistanceLayer(layers.Layer):
    """The distances from the anchor to the positive and to the negative."""

    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        ap_distance = tf.reduce_sum(tf.square(anchor - positive), -1)
        an_distance = tf.reduce_sum(tf.square(anchor - negative), -1)
        return ap_distance, an_distance


@program
def siamese_triplets(nano: Any, step: Any) -> Any:
    """Trains a three-input model of distances on zipped datasets (keras.io, siamese_network)."""
    embedding = mlp(4, 8, 3)
    inputs = [tf.keras.Input(name=name, shape=(4,)) for name in ("anchor", "positive", "negative")]
    distances = DistanceLayer()(*[embedding(tensor) for tensor in inputs])
    network = tf.keras.Model(inputs=inputs, outputs=distances)
    optimizer = tf.keras.optimizers.Adam(1e-3)
    tracker = tf.keras.metrics.Mean(name="loss")

    def compute_loss(data):
        ap_distance, an_distance = network(data)
        return tf.maximum(ap_distance - an_distance + 0.5, 0.0)

    @step
    @tf.function
    def train_step(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(compute_loss(data))
        gradients = tape.gradient(loss, network.trainable_weights)
        optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))
        tracker.update_state(loss)
        return tracker.result()

    @nano
    def train(anchors, positives, negatives):
        dataset = tf.data.Dataset.zip((anchors, positives, negatives))
        dataset = dataset.shuffle(buffer_size=64, seed=7).batch(14, drop_remainder=False)
        results = []
        for triplets in dataset.prefetch(8):
            results.append(train_step(list(triplets)))
        return results

    anchors = rows(31)
    parts = [anchors, anchors + 0.1 * rows(31, seed=1), rows(31, seed=2)]
    results = train(*[tf.data.Dataset.from_tensor_slices(part) for part in parts])
    return results, embedding.get_weights()


@program
def siamese_pairs(nano: Any, step: Any) -> Any:
    """Pairs and a contrastive margin loss made by a function (keras.io, siamese_contrastive)."""

    def make_loss(margin=1):
        def contrastive_loss(y_true, y_pred):
            square_pred = tf.square(y_pred)
            margin_square = tf.square(tf.maximum(margin - y_pred, 0))
            return tf.reduce_mean((1 - y_true) * square_pred + y_true * margin_square)

        return contrastive_loss

    @nano
    def train(left, right, different):
        tower = mlp(4, 8, 3)
        norm = layers.BatchNormalization()
        output = layers.Dense(1, activation="sigmoid")
        loss_fn = make_loss(margin=1)
        optimizer = tf.keras.optimizers.RMSprop(1e-3)

        @step
        @tf.function
        def train_step(a, b, y):
            with tf.GradientTape() as tape:
                gap = tower(a) - tower(b)
                distance = tf.sqrt(tf.reduce_sum(gap**2, axis=1, keepdims=True) + 1e-9)
                loss = loss_fn(y, output(norm(distance, training=True)))
            weights = [w for part in (tower, norm, output) for w in part.trainable_weights]
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        losses = []
        for start in range(0, len(left), 12):
            part = slice(start, start + 12)
            losses.append(train_step(left[part], right[part], different[part]))
        return losses, tower.get_weights(), norm.get_weights(), output.get_weights()

    different = labels(33, 2).astype("float64")[:, None]
    return train(rows(33), rows(33, seed=5), different)


@program
def barlow_twins(nano: Any, step: Any) -> Any:
    """A cross-correlation matrix of two views, normalized over the batch (keras.io, vision)."""
    encoder = mlp(6, 10, 5)
    optimizer = tf.keras.optimizers.SGD(0.02, momentum=0.9)

    class BarlowLoss(tf.keras.losses.Loss):
        def __init__(self, batch_size, lambda_amt=5e-3):
            super().__init__()
            self.lambda_amt = lambda_amt
            self.batch_size = batch_size

        def normalize(self, x):
            return (x - tf.reduce_mean(x, axis=0)) / tf.math.reduce_std(x, axis=0)

        def call(self, y_true, y_pred):
            matrix = tf.transpose(self.normalize(y_true)) @ self.normalize(y_pred)
            matrix /= tf.cast(self.batch_size, matrix.dtype)
            on = tf.square(1 - tf.linalg.diag_part(matrix))
            off = tf.square(matrix - tf.linalg.diag(tf.linalg.diag_part(matrix)))
            return tf.reduce_sum(on) + self.lambda_amt * tf.reduce_sum(off)

    loss_fn = BarlowLoss(16)

    @step
    @tf.function
    def train_step(versions):
        first, second = versions
        with tf.GradientTape() as tape:
            loss = loss_fn(encoder(first, training=True), encoder(second, training=True))
        grads = tape.gradient(loss, encoder.trainable_variables)
        optimizer.apply_gradients(zip(grads, encoder.trainable_variables, strict=True))
        return {"loss": loss}

    @nano
    def train(dataset):
        return [train_step(versions)["loss"] for versions in dataset]

    x = rows(64, 6)
    views = (x + 0.1 * rows(64, 6, seed=1), x + 0.1 * rows(64, 6, seed=2))
    dataset = tf.data.Dataset.from_tensor_slices(views).batch(16, drop_remainder=True)
    return train(dataset), encoder.get_weights()


@program
def byol(nano: Any, step: Any) -> Any:
    """Trains an online net to predict a slowly moving target net's output for another view."""
    online = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(5,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(4),
        ]
    )
    target = tf.keras.models.clone_model(online)
    target.set_weights(online.get_weights())
    predictor = mlp(4, 6, 4)
    optimizer = tf.keras.optimizers.SGD(0.1)
    tau = tf.Variable(0.9, dtype=tf.float64)

    def regression_loss(p, z):
        p, z = tf.math.l2_normalize(p, axis=-1), tf.math.l2_normalize(z, axis=-1)
        return 2 - 2 * tf.reduce_mean(tf.reduce_sum(p * z, axis=-1))

    @step
    @tf.function
    def train_step(first, second):
        with tf.GradientTape() as tape:
            z1 = tf.stop_gradient(target(first, training=True))
            z2 = tf.stop_gradient(target(second, training=True))
            p1 = predictor(online(first, training=True))
            p2 = predictor(online(second, training=True))
            loss = regression_loss(p1, z2) + regression_loss(p2, z1)
        variables = online.trainable_variables + predictor.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def update_target():
        for slow, fast in zip(target.trainable_weights, online.trainable_weights, strict=True):
            slow.assign(tau * slow + (1 - tau) * fast)

    @nano
    def train(x, epochs=2):
        losses = []
        for epoch in range(epochs):
            for batch in batches(x):
                first = batch + tf.random.normal(batch.shape, stddev=0.1, dtype=batch.dtype)
                second = batch + tf.random.normal(batch.shape, stddev=0.1, dtype=batch.dtype)
                losses.append(train_step(first, second))
                update_target()
            tau.assign(1 - (1 - 0.9) * (np.cos(np.pi * (epoch + 1) / epochs) + 1) / 2)
        return losses, tau

    return train(rows(36, 5)), online.get_weights(), target.get_weights()


@program
def nnclr(nano: Any, step: Any) -> Any:
    """Replaces the view by nearest neighbors from a queue variable (keras.io, nnclr)."""
    encoder, head = mlp(5, 8, 6), mlp(6, 4)
    queue = tf.Variable(
        tf.math.l2_normalize(tf.random.normal((20, 4), dtype=tf.float64), axis=1), trainable=False
    )
    optimizer = tf.keras.optimizers.Adam(3e-3)
    accuracies = []

    def nearest_neighbour(projections):
        support = tf.matmul(projections, queue, transpose_b=True)
        nearest = tf.gather(queue, tf.argmax(support, axis=1), axis=0)
        return projections + tf.stop_gradient(nearest - projections)

    def contrastive_loss(projections_1, projections_2):
        one = tf.math.l2_normalize(projections_1, axis=1)
        two = tf.math.l2_normalize(projections_2, axis=1)
        similarities = tf.concat(
            [
                tf.matmul(nearest_neighbour(one), two, transpose_b=True) / 0.1,
                tf.matmul(nearest_neighbour(two), one, transpose_b=True) / 0.1,
            ],
            axis=0,
        )
        batch_size = tf.shape(one)[0]
        answers = tf.concat([tf.range(batch_size), tf.range(batch_size)], axis=0)
        loss = tf.keras.losses.sparse_categorical_crossentropy(
            answers, similarities, from_logits=True
        )
        queue.assign(tf.concat([one, queue[:-batch_size]], axis=0))
        return tf.reduce_mean(loss), tf.reduce_mean(tf.reduce_max(similarities, axis=1))

    @step
    @tf.function
    def train_step(x):
        first = x + tf.random.normal(tf.shape(x), stddev=0.1, dtype=x.dtype)
        second = x + tf.random.normal(tf.shape(x), stddev=0.1, dtype=x.dtype)
        with tf.GradientTape() as tape:
            loss, highest = contrastive_loss(head(encoder(first)), head(encoder(second)))
        weights = encoder.trainable_weights + head.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss, highest

    @nano
    def train(dataset):
        losses = []
        for x in dataset:
            loss, highest = train_step(x)
            losses.append(loss.numpy())
            accuracies.append(float(highest))
        return losses

    return train(batches(rows(35, 5), size=12)), accuracies, queue, encoder.get_weights()


@program
def moco(nano: Any, step: Any) -> Any:
    """A momentum encoder fills a dictionary of keys that the loop keeps as a NumPy array."""
    query_net, key_net = mlp(5, 8, 4), mlp(5, 8, 4)
    key_net.set_weights(query_net.get_weights())
    optimizer = tf.keras.optimizers.SGD(0.2, momentum=0.9)

    @step
    @tf.function
    def train_step(queries, keys, dictionary):
        k = tf.stop_gradient(tf.math.l2_normalize(key_net(keys), axis=1))
        with tf.GradientTape() as tape:
            q = tf.math.l2_normalize(query_net(queries), axis=1)
            positive = tf.einsum("nc,nc->n", q, k)[:, None]
            negative = tf.einsum("nc,kc->nk", q, dictionary)
            logits = tf.concat([positive, negative], axis=1) / 0.2
            answers = tf.zeros(tf.shape(logits)[0], dtype=tf.int64)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=answers, logits=logits)
            loss = tf.reduce_mean(loss)
        grads = tape.gradient(loss, query_net.trainable_variables)
        optimizer.apply_gradients(zip(grads, query_net.trainable_variables, strict=True))
        for slow, fast in zip(key_net.weights, query_net.weights, strict=True):
            slow.assign(slow * 0.95 + fast * 0.05)
        return loss, k

    @nano
    def train(x):
        dictionary = np.random.normal(size=(24, 4))
        dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
        losses = []
        for batch in batches(x, size=10).map(lambda x: (x * 1.1, x * 0.9)):
            loss, keys = train_step(*batch, dictionary)
            dictionary = np.concatenate([keys.numpy(), dictionary])[:24]
            losses.append(loss)
        return losses, dictionary

    return train(rows(33, 5)), query_net.get_weights(), key_net.get_weights()


@program
def two_tower_retrieval(nano: Any, step: Any) -> Any:
    """Users against the items of the batch, in-batch softmax (tensorflow.org/recommenders)."""

    class Tower(tf.keras.Model):
        def __init__(self, vocabulary):
            super().__init__()
            self.embedding = layers.Embedding(vocabulary, 4)
            self.dense = layers.Dense(4)

        def call(self, ids):
            return self.dense(self.embedding(ids))

    users, items = Tower(9), Tower(30)
    optimizer = tf.keras.optimizers.Adagrad(0.1)
    loss_fn = tf.keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")
    top_scores = tf.keras.metrics.Mean()

    @step
    @tf.function
    def train_step(features):
        with tf.GradientTape() as tape:
            queries = users(features["user"])
            candidates = items(features["item"])
            scores = tf.linalg.matmul(queries, candidates, transpose_b=True)
            answers = tf.eye(tf.shape(scores)[0], dtype=scores.dtype)
            loss = loss_fn(answers, scores)
        variables = users.trainable_variables + items.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        top_scores.update_state(tf.linalg.diag_part(scores))
        return loss

    @nano
    def train(ratings):
        losses = []
        for features in ratings.shuffle(100, seed=42, reshuffle_each_iteration=False).batch(13):
            losses.append(train_step(features))
        return losses, top_scores.result()

    ratings = {"user": labels(47, 9), "item": labels(47, 30, seed=5)}
    result = train(tf.data.Dataset.from_tensor_slices(ratings))
    return result, users.get_weights(), items.get_weights()
