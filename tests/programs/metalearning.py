"""Meta-learning, and nets that teach nets."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, mlp, rows
from tensorflow.keras import layers


def _sine_task(generator: Any, count: int) -> Any:
    amplitude, phase = generator.uniform(0.1, 5.0), generator.uniform(0, np.pi)
    x = generator.uniform(-5, 5, size=(count, 1))
    return x, amplitude * np.sin(x + phase)


@program
def maml(nano: Any, step: Any) -> Any:
    """Second-order gradients through one inner step of plain weight tensors."""
    weights = [
        tf.Variable(tf.random.normal(shape, stddev=0.4, dtype=tf.float64))
        for shape in ((1, 8), (8,), (8, 1), (1,))
    ]
    optimizer = tf.keras.optimizers.Adam(1e-2)

    def forward(x, w):
        return tf.tanh(x @ w[0] + w[1]) @ w[2] + w[3]

    def mse(y, prediction):
        return tf.reduce_mean(tf.square(y - prediction))

    @step
    @tf.function
    def train_step(support_x, support_y, query_x, query_y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner_loss = mse(support_y, forward(support_x, weights))
            gradients = inner.gradient(inner_loss, weights)
            adapted = [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)]
            loss = mse(query_y, forward(query_x, adapted))
        optimizer.apply_gradients(zip(outer.gradient(loss, weights), weights, strict=True))
        return inner_loss, loss

    @nano
    def train(tasks):
        generator = np.random.default_rng(0)
        losses = []
        for _ in range(tasks):
            x, y = _sine_task(generator, 21)
            losses.append(train_step(x[:10], y[:10], x[10:], y[10:]))
        return losses

    return train(4), [weight.numpy() for weight in weights]


@program
def maml_keras(nano: Any, step: Any) -> Any:
    """Adapts a copied model per task, first order; sums meta gradients in a list."""
    model, copy = mlp(1, 8, 1), mlp(1, 8, 1)
    meta_optimizer = tf.keras.optimizers.SGD(0.01)
    inner_rate = 0.02

    @step
    @tf.function
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.MeanSquaredError()(y, copy(x))
        return loss, tape.gradient(loss, copy.trainable_variables)

    @nano
    def train(rounds):
        generator = np.random.default_rng(1)
        losses = []
        for _ in range(rounds):
            sums = [np.zeros(v.shape) for v in model.trainable_variables]
            for _task in range(2):
                x, y = _sine_task(generator, 22)
                copy.set_weights(model.get_weights())
                _, inner = gradients_of(x[:11], y[:11])
                for variable, gradient in zip(copy.trainable_variables, inner, strict=True):
                    variable.assign_sub(inner_rate * gradient)
                loss, outer = gradients_of(x[11:], y[11:])
                sums = [total + g.numpy() for total, g in zip(sums, outer, strict=True)]
                losses.append(float(loss))
            mean = [tf.constant(total / 2) for total in sums]
            meta_optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return losses

    return train(2), model.get_weights()


@program
def reptile(nano: Any, step: Any) -> Any:
    """Weights before and after a few inner steps, interpolated (keras.io/examples/vision)."""
    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.05)
    x, y = rows(60), labels(60)

    @step
    @tf.function
    def inner_step(pictures, answers):
        with tf.GradientTape() as tape:
            preds = model(pictures)
            loss = tf.keras.losses.sparse_categorical_crossentropy(answers, preds, from_logits=True)
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        return tf.reduce_mean(loss)

    @nano
    def train(meta_iters, meta_step_size=0.25):
        shown = []
        for meta_iter in range(meta_iters):
            frac_done = meta_iter / meta_iters
            cur_meta_step_size = (1 - frac_done) * meta_step_size
            old_vars = model.get_weights()
            picks = np.random.choice(60, size=20, replace=False)
            mini = tf.data.Dataset.from_tensor_slices((x[picks], y[picks]))
            for pictures, answers in mini.shuffle(20).batch(8).repeat(1):
                shown.append(inner_step(pictures, answers))
            new_vars = model.get_weights()
            for var in range(len(new_vars)):
                new_vars[var] = old_vars[var] + (
                    (new_vars[var] - old_vars[var]) * cur_meta_step_size
                )
            model.set_weights(new_vars)
        return shown

    return train(2), model.get_weights()


@program
def prototypical_networks(nano: Any, step: Any) -> Any:
    """Compares queries with prototypes, the means of supports."""
    CLASSES, SHOTS, QUERIES = 3, 4, 5
    encoder = mlp(5, 8, 4)
    optimizer = tf.keras.optimizers.Adam(5e-3)

    @step
    @tf.function
    def train_step(support, query):
        with tf.GradientTape() as tape:
            z = encoder(tf.reshape(support, (CLASSES * SHOTS, 5)))
            prototypes = tf.reduce_mean(tf.reshape(z, (CLASSES, SHOTS, -1)), axis=1)
            zq = encoder(tf.reshape(query, (CLASSES * QUERIES, 5)))
            distances = tf.reduce_sum((zq[:, None] - prototypes[None]) ** 2, axis=-1)
            log_p = tf.reshape(tf.nn.log_softmax(-distances), (CLASSES, QUERIES, CLASSES))
            loss = -tf.reduce_mean([tf.reduce_mean(log_p[k, :, k]) for k in range(CLASSES)])
        grads = tape.gradient(loss, encoder.trainable_variables)
        optimizer.apply_gradients(zip(grads, encoder.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, y):
        by_class = [x[y == k] for k in range(CLASSES)]
        losses = []
        for _ in range(3):
            support, query = [], []
            for members in by_class:
                order = np.random.permutation(len(members))
                support.append(members[order[:SHOTS]])
                query.append(members[order[SHOTS : SHOTS + QUERIES]])
            losses.append(train_step(np.stack(support), np.stack(query)))
        return losses

    return train(rows(60, 5), labels(60)), encoder.get_weights()


@program
def matching_labels(nano: Any, step: Any) -> Any:
    """Prototypes per batch with unsorted_segment_mean over labels of whole batches."""
    encoder = mlp(5, 8, 4)
    optimizer = tf.keras.optimizers.SGD(0.1)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            z = encoder(x)
            centres = tf.math.unsorted_segment_mean(z, y, 3)
            distances = tf.reduce_sum((z[:, None] - centres[None]) ** 2, axis=-1)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=-distances)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, encoder.trainable_variables)
        optimizer.apply_gradients(zip(grads, encoder.trainable_variables, strict=True))
        return loss, centres

    @nano
    def train(x, y):
        losses, centres = [], tf.zeros((3, 4), tf.float64)
        for batch in batches(x, y, size=17):
            loss, new = train_step(*batch)
            centres = 0.5 * centres + 0.5 * new
            losses.append(loss)
        return losses, centres

    return train(rows(44, 5), labels(44)), encoder.get_weights()


@program
def mean_teacher(nano: Any, step: Any) -> Any:
    """Consistency with a moving average of the student, ramped up by the step's number."""
    student, teacher = mlp(4, 8, 3), mlp(4, 8, 3)
    teacher.set_weights(student.get_weights())
    optimizer = tf.keras.optimizers.Adam(5e-3)
    state = {"step": 0}

    @step
    @tf.function
    def train_step(x, y, unlabelled, weight):
        with tf.GradientTape() as tape:
            both = tf.concat([x, unlabelled], axis=0)
            noise = tf.random.normal(tf.shape(both), stddev=0.1, dtype=both.dtype)
            logits = student(both + noise, training=True)
            targets = tf.stop_gradient(tf.nn.softmax(teacher(both, training=True)))
            classification = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits[: tf.shape(x)[0]])
            )
            consistency = tf.reduce_mean((tf.nn.softmax(logits) - targets) ** 2)
            loss = classification + weight * consistency
        grads = tape.gradient(loss, student.trainable_variables)
        optimizer.apply_gradients(zip(grads, student.trainable_variables, strict=True))
        return classification, consistency

    @nano
    def train(labelled, unlabelled):
        log = []
        for (x, y), u in zip(labelled, unlabelled, strict=False):
            state["step"] += 1
            weight = tf.constant(np.exp(-5 * (1 - min(1.0, state["step"] / 4)) ** 2))
            log.append(train_step(x, y, u, weight))
            alpha = min(1 - 1 / (state["step"] + 1), 0.95)
            for slow, fast in zip(teacher.weights, student.weights, strict=True):
                slow.assign(alpha * slow + (1 - alpha) * fast)
        return log

    log = train(batches(rows(31), labels(31), size=8), batches(rows(52, seed=9), size=13))
    return log, state["step"], student.get_weights(), teacher.get_weights()


@program
def knowledge_distillation(nano: Any, step: Any) -> Any:
    """A Distiller with its own compile arguments as attributes (keras.io/examples/vision)."""

    class Distiller:
        def __init__(self, student, teacher, alpha=0.1, temperature=3):
            self.teacher, self.student = teacher, student
            self.alpha, self.temperature = alpha, temperature
            self.optimizer = tf.keras.optimizers.Adam(5e-3)
            self.student_loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.distillation_loss_fn = tf.keras.losses.KLDivergence()
            self.metric = tf.keras.metrics.SparseCategoricalAccuracy()

        def compute(self, x, y):
            teacher_predictions = self.teacher(x, training=False)
            with tf.GradientTape() as tape:
                student_predictions = self.student(x, training=True)
                student_loss = self.student_loss_fn(y, student_predictions)
                distillation_loss = self.distillation_loss_fn(
                    tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                    tf.nn.softmax(student_predictions / self.temperature, axis=1),
                )
                distillation_loss *= self.temperature**2
                loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
            variables = self.student.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
            self.metric.update_state(y, student_predictions)
            return {"student_loss": student_loss, "distillation_loss": distillation_loss}

    distiller = Distiller(mlp(4, 3, 3), mlp(4, 12, 3))
    train_step = step(tf.function(distiller.compute))

    @nano
    def fit(x, y):
        results = []
        for batch in batches(x, y):
            results.append({name: float(v) for name, v in train_step(*batch).items()})
        return results, distiller.metric.result()

    return fit(rows(40), labels(40)), distiller.student.get_weights()


@program
def pseudo_labels(nano: Any, step: Any) -> Any:
    """Labels unlabeled rows by a net in NumPy, weighs them by confidence, and trains again."""
    model = mlp(4, 8, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(x, y, w):
        with tf.GradientTape() as tape:
            losses = tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=model(x))
            loss = tf.reduce_sum(losses * w) / tf.reduce_sum(w)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, y, unlabelled):
        losses = []
        weights = np.ones(len(x))
        for _round in range(2):
            for batch in batches(x, y, weights, size=14):
                losses.append(train_step(*batch))
            scores = tf.nn.softmax(model(unlabelled)).numpy()
            soft = scores**2 / np.sum(scores**2, axis=1, keepdims=True)
            x = np.concatenate([x, unlabelled])
            y = np.concatenate([y, soft])
            weights = np.concatenate([weights, scores.max(axis=1)])
        return losses, y, weights

    return train(rows(19), np.eye(3)[labels(19)], rows(12, seed=5)), model.get_weights()


@program
def born_again_ensemble(nano: Any, step: Any) -> Any:
    """Trains students in a list, each taught by the mean of the earlier; makes steps in a loop."""

    def make_step(student, optimizer):
        @step
        @tf.function
        def train_step(x, soft):
            with tf.GradientTape() as tape:
                logits = student(x, training=True)
                loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(soft, logits))
            grads = tape.gradient(loss, student.trainable_variables)
            optimizer.apply_gradients(zip(grads, student.trainable_variables, strict=True))
            return loss

        return train_step

    @nano
    def train(x, y, generations):
        ensemble, losses = [], []
        for _ in range(generations):
            student = tf.keras.Sequential(
                [tf.keras.Input(shape=(4,)), layers.Dense(6, "relu"), layers.Dense(3)]
            )
            train_step = make_step(student, tf.keras.optimizers.SGD(0.2))
            for batch_x, batch_y in batches(x, y):
                soft = tf.one_hot(batch_y, 3, dtype=tf.float64)
                if ensemble:
                    votes = [tf.nn.softmax(net(batch_x)) for net in ensemble]
                    soft = 0.5 * soft + 0.5 * tf.add_n(votes) / len(votes)
                losses.append(float(train_step(batch_x, soft)))
            ensemble.append(student)
        return losses, [net.get_weights() for net in ensemble]

    return train(rows(33), labels(33), 3)
