"""Loops of all kinds around a step: counters, validation, accumulation, early stops."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, mlp, rows, targets
from tensorflow.keras import layers

GLOBAL_STEP = 0
HISTORY: list[float] = []


@program
def writing_a_training_loop(nano: Any, step: Any) -> Any:
    """Metrics for training and validation, a test step (guide on writing a loop from scratch)."""
    inputs = tf.keras.Input(shape=(4,), name="digits")
    x = layers.Dense(8, activation="relu", name="dense_1")(inputs)
    outputs = layers.Dense(3, name="predictions")(x)
    model = tf.keras.Model(inputs=inputs, outputs=outputs)
    optimizer = tf.keras.optimizers.Adam(learning_rate=1e-3)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_acc_metric = tf.keras.metrics.SparseCategoricalAccuracy()
    val_acc_metric = tf.keras.metrics.SparseCategoricalAccuracy()

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        train_acc_metric.update_state(y, logits)
        return loss_value

    @step
    @tf.function
    def test_step(x, y):
        val_logits = model(x, training=False)
        val_acc_metric.update_state(y, val_logits)

    @nano
    def train(train_dataset, val_dataset, epochs=2):
        shown = []
        for epoch in range(epochs):
            for number, (x_batch_train, y_batch_train) in enumerate(train_dataset):
                loss_value = train_step(x_batch_train, y_batch_train)
                if number % 2 == 0:
                    shown.append((epoch, number, float(loss_value), (number + 1) * 16))
            train_acc = train_acc_metric.result()
            train_acc_metric.reset_state()
            for x_batch_val, y_batch_val in val_dataset:
                test_step(x_batch_val, y_batch_val)
            val_acc = val_acc_metric.result()
            val_acc_metric.reset_state()
            shown.append((float(train_acc), float(val_acc)))
        return shown

    train_dataset = tf.data.Dataset.from_tensor_slices((rows(45), labels(45)))
    train_dataset = train_dataset.shuffle(buffer_size=1024).batch(16)
    shown = train(train_dataset, batches(rows(20, seed=3), labels(20)))
    return shown, model.get_weights(), optimizer.iterations


@program
def plain_loop_without_steps(nano: Any, step: Any) -> Any:
    """Uses no step function and no tf.function: tape and update are in the loop itself."""

    @nano
    def train(x, y, epochs):
        model = mlp(4, 6, 1)
        optimizer = tf.keras.optimizers.SGD(learning_rate=0.05)
        epoch_losses = []
        for _ in range(epochs):
            loss_sum, n = 0.0, 0
            for xb, yb in tf.data.Dataset.from_tensor_slices((x, y)).batch(16):
                with tf.GradientTape() as tape:
                    errors = tf.square(model(xb, training=True) - yb)
                    loss = tf.reduce_mean(errors)
                grads = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
                loss_sum += loss.numpy() * len(yb)
                n += len(yb)
            epoch_losses.append(loss_sum / n)
        return epoch_losses, n, model.get_weights()

    x = rows(37)
    return train(x, targets(x), 2)


@program
def accumulation_in_variables(nano: Any, step: Any) -> Any:
    """Accumulates gradients in variables, applied every second batch and once at the end."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    accumulated = [
        tf.Variable(tf.zeros(v.shape, tf.float64), trainable=False)
        for v in model.trainable_variables
    ]
    counter = tf.Variable(0, dtype=tf.int64)

    @step
    @tf.function
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        for total, g in zip(
            accumulated, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            total.assign_add(g)
        counter.assign_add(1)
        return loss

    @tf.function
    def apply():
        count = tf.cast(counter, tf.float64)
        grads = [total / count for total in accumulated]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        for total in accumulated:
            total.assign(tf.zeros_like(total))
        counter.assign(0)

    @nano
    def train(dataset):
        losses = []
        for number, (x, y) in enumerate(dataset):
            losses.append(accumulate(x, y))
            if number % 2 == 1:
                apply()
        if int(counter) > 0:
            apply()
        return losses

    x = rows(69)
    return train(batches(x, targets(x))), counter, optimizer.iterations, model.get_weights()


@program
def accumulation_in_lists(nano: Any, step: Any) -> Any:
    """Averages three gradients at a time, returned by a step and kept in the loop's list."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.SGD(0.1)

    @step
    @tf.function
    def grad_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
        return loss, tape.gradient(loss, model.trainable_variables)

    @nano
    def train(dataset):
        kept, losses = [], []
        for x, y in dataset:
            loss, grads = grad_step(x, y)
            losses.append(loss)
            kept.append(grads)
            if len(kept) == 3:
                mean = [tf.add_n(parts) / len(parts) for parts in zip(*kept, strict=True)]
                optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
                kept.clear()
        return losses, kept

    x = rows(60)
    return train(batches(x, targets(x), size=12)), model.get_weights()


@program
def early_stopping(nano: Any, step: Any) -> Any:
    """Stops by a patience counter, with best weights kept and restored, and a break."""
    model = mlp(4, 10, 1)
    optimizer = tf.keras.optimizers.SGD(0.35)
    loss_fn = tf.keras.losses.MeanSquaredError()

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    @nano
    def train(dataset, val_x, val_y, patience=1):
        best, best_weights, wait, history = np.inf, None, 0, []
        for epoch in range(8):
            for x, y in dataset:
                train_step(x, y)
            val_loss = float(loss_fn(val_y, model(val_x, training=False)))
            history.append((epoch, val_loss))
            if val_loss < best - 1e-4:
                best, best_weights, wait = val_loss, model.get_weights(), 0
            else:
                wait += 1
                if wait >= patience:
                    break
        model.set_weights(best_weights)
        return history, best

    x, val_x = rows(21), rows(9, seed=8)
    return train(batches(x, targets(x), size=8), val_x, targets(val_x)), model.get_weights()


@program
def curriculum(nano: Any, step: Any) -> Any:
    """Adds hard examples as a Python counter grows; batches are NumPy slices of sorted rows."""
    state = {"stage": 0, "seen": 0}
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.Adam(5e-3)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(y - model(x)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, y):
        losses = []
        order = np.argsort(np.abs(y[:, 0]))
        while state["stage"] < 3:
            easy = order[: (state["stage"] + 1) * len(order) // 3]
            np.random.shuffle(easy)
            for i in range(0, len(easy), 15):
                chosen = easy[i : i + 15]
                losses.append(float(train_step(x[chosen], y[chosen])))
                state["seen"] += len(chosen)
            state["stage"] += 1
        return losses

    x = rows(40)
    return train(x, targets(x)), state["stage"], state["seen"], model.get_weights()


@program
def learning_rate_by_hand(nano: Any, step: Any) -> Any:
    """Assigns and decays optimizer.learning_rate, momentum too, and records the rates."""
    model = mlp(4, 8, 1)
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.2, momentum=0.9)
    rates = []

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(x, y):
        losses = []
        for epoch in range(3):
            for xb, yb in batches(x, y):
                losses.append(train_step(xb, yb))
            if epoch == 0:
                optimizer.learning_rate.assign(0.1)
            else:
                optimizer.learning_rate = float(optimizer.learning_rate) * 0.5
            rates.append(float(optimizer.learning_rate))
        return losses

    x = rows(33)
    return train(x, targets(x)), rates, optimizer.learning_rate, model.get_weights()


@program
def global_counters(nano: Any, step: Any) -> Any:
    """Increments and fills module globals in the loop, and reads them after it."""
    global GLOBAL_STEP
    GLOBAL_STEP = 0
    HISTORY.clear()
    model = mlp(4, 5, 1)
    optimizer = tf.keras.optimizers.SGD(0.1)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def train(dataset):
        global GLOBAL_STEP
        for x, y in dataset:
            loss = train_step(x, y)
            GLOBAL_STEP += 1
            HISTORY.append(float(loss) / GLOBAL_STEP)

    x = rows(40)
    train(batches(x, targets(x)))
    return GLOBAL_STEP, list(HISTORY), model.get_weights()


@program
def nonlocal_counters(nano: Any, step: Any) -> Any:
    """Changes nonlocal numbers, a Counter, a defaultdict and a running best in the loop."""
    model = mlp(4, 6, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    n_seen, correct, best = 0, 0, float("inf")
    counts, by_epoch = Counter(), defaultdict(list)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_fn(y, logits)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        hits = tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.int64)
        return loss, tf.reduce_sum(hits)

    @nano
    def train(x, y):
        nonlocal n_seen, correct, best
        for epoch in range(2):
            for xb, yb in batches(x, y):
                loss, hits = train_step(xb, yb)
                n_seen += len(yb)
                correct += int(hits)
                best = min(best, float(loss))
                counts.update(yb.numpy().tolist())
                by_epoch[epoch].append(float(loss))

    train(rows(35), labels(35))
    counted = [counts[k] for k in range(3)]
    return n_seen, correct, best, counted, dict(by_epoch), model.get_weights()
