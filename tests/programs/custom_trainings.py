"""Trainings around loops: trainer classes, resumed runs, ensembles, folds, data of many forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, mlp, rows, targets


@program
def trainer_class(nano: Any, step: Any) -> Any:
    """Decorates methods of a Trainer whose attributes the loop changes."""

    class Trainer:
        def __init__(self, model, learning_rate):
            self.model = model
            self.optimizer = tf.keras.optimizers.Adam(learning_rate)
            self.loss_metric = tf.keras.metrics.Mean()
            self.history = []
            self.current_epoch = 0
            self.train_step = step(tf.function(self._train_step))
            self.fit = nano(self._fit)

        def compute_loss(self, x, y):
            return tf.reduce_mean(tf.square(y - self.model(x, training=True)))

        def _train_step(self, x, y):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y)
            grads = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.model.trainable_variables, strict=True))
            self.loss_metric.update_state(loss)

        def _fit(self, dataset, epochs):
            for _ in range(epochs):
                self.loss_metric.reset_state()
                for x, y in dataset:
                    self.train_step(x, y)
                self.history.append(float(self.loss_metric.result()))
                self.current_epoch += 1
            return self.history[-1]

    x = rows(37)
    trainer = Trainer(mlp(4, 8, 1), 1e-2)
    last = trainer.fit(batches(x, targets(x)), 2)
    return last, trainer.history, trainer.current_epoch, trainer.model.get_weights()


@program
def loop_with_trainer_outside(nano: Any, step: Any) -> Any:
    """Drives an object from a plain function; its methods train, with state in its attributes."""

    class Agent:
        def __init__(self):
            self.net = mlp(4, 6, 2)
            self.optimizer = tf.keras.optimizers.RMSprop(3e-3)
            self.updates = 0
            self.log = {"loss": [], "norm": []}

        def learn(self, x, y):
            loss, norm = update(x, y)
            self.updates += 1
            self.log["loss"].append(float(loss))
            self.log["norm"].append(float(norm))

    agent = Agent()

    @step
    @tf.function
    def update(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.losses.huber(y, agent.net(x)))
        grads = tape.gradient(loss, agent.net.trainable_variables)
        agent.optimizer.apply_gradients(zip(grads, agent.net.trainable_variables, strict=True))
        return loss, tf.linalg.global_norm(grads)

    @nano
    def train(x, y):
        for batch in batches(x, y, size=13):
            agent.learn(*batch)

    x = rows(36)
    train(x, targets(x, 2))
    return agent.updates, agent.log, agent.net.get_weights()


@program
def several_batches_in_a_step(nano: Any, step: Any) -> Any:
    """Takes labeled, unlabeled and noise batches of different lengths in one step."""
    encoder, decoder, head = mlp(4, 6), mlp(6, 4), mlp(6, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(labelled, unlabelled, noise):
        x, y = labelled
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, head(encoder(x)))
            classification = tf.reduce_mean(losses)
            restored = decoder(encoder(unlabelled))
            reconstruction = tf.reduce_mean((restored - unlabelled) ** 2)
            flat = tf.reduce_mean(tf.abs(encoder(noise)))
            loss = classification + reconstruction + 0.1 * flat
        parts = (encoder, decoder, head)
        variables = [v for part in parts for v in part.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return classification, reconstruction, flat

    @nano
    def train(first, second):
        log = []
        second_iterator = iter(second.repeat())
        for labelled in first:
            noise = tf.random.normal((5, 4), dtype=tf.float64)
            log.append(train_step(labelled, next(second_iterator), noise))
        return log

    log = train(batches(rows(29), labels(29), size=8), batches(rows(40, seed=6), size=14))
    return log, encoder.get_weights(), decoder.get_weights(), head.get_weights()


@program
def confusion_matrix_by_numpy(nano: Any, step: Any) -> Any:
    """Returns predictions from the step; NumPy counts the matrix and derives recall."""
    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @step
    @tf.function
    def predict_step(x):
        return tf.argmax(model(x, training=False), axis=-1)

    @nano
    def train(dataset, test):
        for x, y in dataset:
            train_step(x, y)
        matrix = np.zeros((3, 3), dtype=int)
        guesses = []
        for x, y in test:
            predicted = predict_step(x).numpy()
            np.add.at(matrix, (y.numpy(), predicted), 1)
            guesses.extend(predicted)
        recall = np.diag(matrix) / np.maximum(matrix.sum(axis=1), 1)
        return matrix, recall, np.array(guesses)

    data = batches(rows(39), labels(39))
    return train(data, batches(rows(25, seed=4), labels(25, seed=5), size=10)), model.get_weights()


@program
def resumed_training(nano: Any, step: Any) -> Any:
    """Calls the decorated loop three times, on different data, with the same optimizer."""
    model = mlp(4, 6, 1)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    losses = []

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset, limit=None):
        for number, (x, y) in enumerate(dataset):
            if limit is not None and number >= limit:
                break
            losses.append(float(train_step(x, y)))
        return len(losses)

    x = rows(48)
    counts = [train(batches(x, targets(x)))]
    counts.append(train(batches(x[:20], targets(x[:20]), size=8), limit=2))
    optimizer.learning_rate.assign(1e-3)
    counts.append(train(batches(x, targets(x), size=24)))
    return counts, losses, optimizer.iterations, model.get_weights()


@program
def ensemble_in_a_list(nano: Any, step: Any) -> Any:
    """Trains three models and optimizers in lists on bootstrap indices; spread of predictions."""
    models = [mlp(4, 5, 1) for _ in range(3)]
    optimizers = [tf.keras.optimizers.Adam(1e-2) for _ in models]

    @step
    @tf.function
    def train_step(x, y):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            losses.append(loss)
        return losses

    @nano
    def train(x, y, probe):
        log = []
        sample = np.random.randint(0, len(x), size=len(x))
        for xb, yb in batches(x[sample], y[sample]):
            log.append(train_step(xb, yb))
        votes = tf.stack([model(probe) for model in models])
        return log, tf.reduce_mean(votes, axis=0), tf.math.reduce_std(votes, axis=0)

    x = rows(41)
    return train(x, targets(x), rows(6, seed=7)), [model.get_weights() for model in models]


@program
def cross_validation(nano: Any, step: Any) -> Any:
    """A new model per fold in the same loop function, folds by NumPy masks."""

    @nano
    def train(x, y, folds):
        scores, weights = [], []
        fold_of = np.arange(len(x)) % folds
        for fold in range(folds):
            model = mlp(4, 5, 1)
            optimizer = tf.keras.optimizers.SGD(0.1)

            def train_step(xb, yb, model=model, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(yb - model(xb)))
                grads = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

            stepped = step(train_step)
            for xb, yb in batches(x[fold_of != fold], y[fold_of != fold]):
                stepped(xb, yb)
            error = y[fold_of == fold] - model(x[fold_of == fold]).numpy()
            scores.append(np.sqrt(np.mean(error**2)))
            weights.append(model.get_weights())
        return scores, np.mean(scores), weights

    x = rows(44)
    return train(x, targets(x), 2)


@program
def generator_of_batches(nano: Any, step: Any) -> Any:
    """Takes batches from a shuffling Python generator; dictionaries go in and out."""
    model = mlp(4, 6, 2)
    optimizer = tf.keras.optimizers.Adamax(1e-2)

    def batch_generator(data, size):
        order = np.random.permutation(len(data["x"]))
        for start in range(0, len(order), size):
            yield {name: values[order[start : start + size]] for name, values in data.items()}

    @step
    @tf.function
    def train_step(batch):
        with tf.GradientTape() as tape:
            prediction = model(batch["x"], training=True)
            errors = tf.reduce_sum(tf.square(prediction - batch["y"]), axis=-1)
            loss = tf.reduce_mean(errors * batch["w"])
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return {"loss": loss, "errors": errors, "worst": tf.reduce_max(errors)}

    @nano
    def train(data):
        logs = {"loss": [], "worst": [], "errors": []}
        for batch in batch_generator(data, 13):
            for name, value in train_step(batch).items():
                logs[name].append(value.numpy())
        return logs["loss"], logs["worst"], np.concatenate(logs["errors"])

    x = rows(34)
    weights = np.random.default_rng(4).uniform(0.5, 1.5, size=34)
    return train({"x": x, "y": targets(x, 2), "w": weights}), model.get_weights()


@program
def dataset_loop_in_tf_function(nano: Any, step: Any) -> Any:
    """Runs a whole epoch in one tf.function that iterates over the dataset."""
    model = mlp(4, 6, 1)
    optimizer = tf.keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_epoch(dataset):
        total = tf.constant(0.0, tf.float64)
        count = tf.constant(0, tf.int32)
        for x, y in dataset:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - model(x)))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            total += loss * tf.cast(tf.shape(x)[0], tf.float64)
            count += tf.shape(x)[0]
        return total / tf.cast(count, tf.float64), count

    @nano
    def train(dataset):
        return [train_epoch(dataset) for _ in range(2)]

    x = rows(38)
    return train(batches(x, targets(x))), model.get_weights()


@program
def kmeans_and_statistics(nano: Any, step: Any) -> Any:
    """Uses no gradients: running mean and variance, soft k-means centers as variables."""
    centres = tf.Variable(rows(3, 2, seed=5))
    mean = tf.Variable(tf.zeros(2, tf.float64))
    variance = tf.Variable(tf.ones(2, tf.float64))

    @step
    @tf.function
    def update(x):
        batch_mean, batch_variance = tf.nn.moments(x, axes=[0])
        mean.assign(0.8 * mean + 0.2 * batch_mean)
        variance.assign(0.8 * variance + 0.2 * batch_variance)
        distances = tf.reduce_sum((x[:, None] - centres[None]) ** 2, axis=-1)
        share = tf.nn.softmax(-2.0 * distances, axis=1)
        new = tf.transpose(share) @ x / tf.reduce_sum(share, axis=0)[:, None]
        centres.assign(new)
        return tf.reduce_sum(share * distances) / tf.cast(len(x), x.dtype)

    @nano
    def train(dataset):
        return [update(x) for x in dataset]

    return train(batches(rows(46, 2))), centres, mean, variance


@program
def random_everywhere(nano: Any, step: Any) -> Any:
    """Draws numbers from all generators, with and without seeds, in the loop and in the step."""
    model = mlp(4, 6, 1)
    optimizer = tf.keras.optimizers.SGD(0.1)
    generator = tf.random.Generator.from_seed(7)

    @step
    @tf.function
    def train_step(x, y):
        x = x + 0.1 * tf.random.normal(tf.shape(x), dtype=x.dtype)
        x = x + 0.1 * tf.random.uniform(tf.shape(x), -1.0, 1.0, seed=5, dtype=x.dtype)
        x = x * generator.uniform((4,), 0.9, 1.1, dtype=x.dtype)
        keep = tf.random.stateless_uniform(tf.shape(x), seed=(1, 2), dtype=x.dtype) < 0.9
        x = tf.where(keep, x, tf.zeros_like(x))
        with tf.GradientTape() as tape:
            hidden = tf.nn.dropout(model.layers[0](x), rate=0.3)
            loss = tf.reduce_mean(tf.square(y - model.layers[1](hidden)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        losses, drawn = [], []
        for x, y in dataset:
            drawn.append(float(np.random.normal()))
            drawn.append(float(tf.random.normal((), dtype=tf.float64)))
            drawn.append(float(generator.normal((), dtype=tf.float64)))
            scale = 1 + 0.1 * np.random.rand(len(x), 1)
            losses.append(train_step(x * scale, y))
        return losses, drawn

    x = rows(35)
    data = tf.data.Dataset.from_tensor_slices((x, targets(x))).shuffle(35).batch(16)
    result = train(data)
    after = np.random.rand(2), tf.random.uniform((2,), dtype=tf.float64)
    return result, after, model.get_weights()
