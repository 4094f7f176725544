"""Sequences: text, characters, translation and time series."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, labels, rows, tokens
from tensorflow.keras import layers


@program
def text_classification(nano: Any, step: Any) -> Any:
    """Embedding, average, logits, binary accuracy (tutorials/keras/text_classification)."""
    model = tf.keras.Sequential(
        [
            layers.Embedding(12, 5),
            layers.Dropout(0.2),
            layers.GlobalAveragePooling1D(),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    loss_object = tf.keras.losses.BinaryCrossentropy()
    optimizer = tf.keras.optimizers.Adam(1e-2)
    accuracy = tf.keras.metrics.BinaryAccuracy(threshold=0.5)

    @step
    @tf.function
    def train_step(texts, answers):
        with tf.GradientTape() as tape:
            predictions = model(texts, training=True)
            loss = loss_object(answers, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(answers, predictions)
        return loss

    @nano
    def train(train_ds, val_ds):
        history = {"loss": [], "accuracy": [], "val_loss": []}
        for _ in range(2):
            accuracy.reset_state()
            losses = [train_step(texts, answers) for texts, answers in train_ds]
            history["loss"].append(np.mean([loss.numpy() for loss in losses]))
            history["accuracy"].append(accuracy.result().numpy())
            val = [loss_object(answers, model(texts)).numpy() for texts, answers in val_ds]
            history["val_loss"].append(np.mean(val))
        return history

    answers = labels(44, 2).astype("float64")[:, None]
    data = tf.data.Dataset.from_tensor_slices((tokens(44), answers))
    train_ds = data.take(33).cache().shuffle(33).batch(16).prefetch(tf.data.AUTOTUNE)
    return train(train_ds, data.skip(33).batch(16)), model.get_weights()


class Encoder(tf.keras.Model):
    """Reads the source sentence."""

    def __init__(self, vocab_size: int, embedding_dim: int, enc_units: int) -> None:
        super().__init__()
        self.enc_units = enc_units
        self.embedding = layers.Embedding(vocab_size, embedding_dim)
        self.gru = layers.GRU(enc_units, return_sequences=True, return_state=True)

    def call(self, x: Any, hidden: Any) -> Any:
        x = self.embedding(x)
        output, state = self.gru(x, initial_state=hidden)
        return output, state

    def initialize_hidden_state(self, batch_size: Any) -> Any:
        return tf.zeros((batch_size, self.enc_units), dtype=tf.float64)


class BahdanauAttention(layers.Layer):
    """Attends to the encoder's outputs."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.W1 = layers.Dense(units)
        self.W2 = layers.Dense(units)
        self.V = layers.Dense(1)

    def call(self, query: Any, values: Any) -> Any:
        query_with_time_axis = tf.expand_dims(query, 1)
        score = self.V(tf.nn.tanh(self.W1(query_with_time_axis) + self.W2(values)))
        attention_weights = tf.nn.softmax(score, axis=1)
        return tf.reduce_sum(attention_weights * values, axis=1), attention_weights


class Decoder(tf.keras.Model):
    """Predicts one word per call."""

    def __init__(self, vocab_size: int, embedding_dim: int, dec_units: int) -> None:
        super().__init__()
        self.embedding = layers.Embedding(vocab_size, embedding_dim)
        self.gru = layers.GRU(dec_units, return_sequences=True, return_state=True)
        self.fc = layers.Dense(vocab_size)
        self.attention = BahdanauAttention(dec_units)

    def call(self, x: Any, hidden: Any, enc_output: Any) -> Any:
        context_vector, attention_weights = self.attention(hidden, enc_output)
        x = self.embedding(x)
        x = tf.concat([tf.expand_dims(context_vector, 1), x], axis=-1)
        output, state = self.gru(x)
        output = tf.reshape(output, (-1, output.shape[2]))
        return self.fc(output), state, attention_weights


@program
def translation_with_attention(nano: Any, step: Any) -> Any:
    """Teacher forcing, a Python loop over time, a hidden state from outside (nmt tutorial)."""
    BATCH_SIZE, units, vocab = 11, 6, 9
    encoder, decoder = Encoder(vocab, 5, units), Decoder(vocab, 5, units)
    optimizer = tf.keras.optimizers.Adam()
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def loss_function(real, pred):
        mask = tf.math.logical_not(tf.math.equal(real, 0))
        loss_ = loss_object(real, pred)
        mask = tf.cast(mask, dtype=loss_.dtype)
        loss_ *= mask
        return tf.reduce_mean(loss_)

    @step
    @tf.function
    def train_step(inp, targ, enc_hidden):
        loss = 0.0
        with tf.GradientTape() as tape:
            enc_output, enc_hidden = encoder(inp, enc_hidden)
            dec_hidden = enc_hidden
            dec_input = tf.expand_dims(tf.cast([1] * BATCH_SIZE, targ.dtype), 1)
            for t in range(1, targ.shape[1]):
                predictions, dec_hidden, _ = decoder(dec_input, dec_hidden, enc_output)
                loss += loss_function(targ[:, t], predictions)
                dec_input = tf.expand_dims(targ[:, t], 1)
        batch_loss = loss / int(targ.shape[1])
        variables = encoder.trainable_variables + decoder.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return batch_loss

    @nano
    def train(dataset, steps_per_epoch, epochs=2):
        shown = []
        for _epoch in range(epochs):
            enc_hidden = encoder.initialize_hidden_state(BATCH_SIZE)
            total_loss = 0
            for _batch, (inp, targ) in enumerate(dataset.take(steps_per_epoch)):
                total_loss += train_step(inp, targ, enc_hidden)
            shown.append(float(total_loss / steps_per_epoch))
        return shown

    data = tf.data.Dataset.from_tensor_slices((tokens(25, 4, vocab), tokens(25, 3, vocab, seed=7)))
    shown = train(data.shuffle(25).batch(BATCH_SIZE, drop_remainder=True), 2)
    return shown, [v.numpy() for v in encoder.trainable_variables + decoder.trainable_variables]


@program
def translation_hidden_from_shape(nano: Any, step: Any) -> Any:
    """Trains a similar net with cells; the state's shape comes from tf.shape of the batch."""
    source, target = layers.Embedding(9, 4, mask_zero=True), layers.Embedding(9, 4)
    cell, out = layers.GRUCell(5), layers.Dense(9)
    optimizer = tf.keras.optimizers.Adam(5e-3, clipnorm=1.0)

    @step
    @tf.function
    def train_step(batch):
        inp, targ = batch["source"], batch["target"]
        with tf.GradientTape() as tape:
            state = tf.zeros((tf.shape(inp)[0], 5), dtype=tf.float64)
            embedded = source(inp)
            mask = source.compute_mask(inp)
            for t in range(inp.shape[1]):
                _, new = cell(embedded[:, t], [state])
                new = new[0] if isinstance(new, (list, tuple)) else new
                state = tf.where(mask[:, t, None], new, state)
            loss = tf.constant(0.0, dtype=tf.float64)
            for t in range(targ.shape[1] - 1):
                _, new = cell(target(targ[:, t]), [state])
                state = new[0] if isinstance(new, (list, tuple)) else new
                loss += tf.reduce_mean(
                    tf.keras.losses.sparse_categorical_crossentropy(
                        targ[:, t + 1], out(state), from_logits=True
                    )
                )
        variables = [v for part in (source, target, cell, out) for v in part.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss, tf.reduce_mean(state, axis=0)

    @nano
    def train(dataset):
        return [train_step(batch) for batch in dataset]

    data = {"source": tokens(29, 3, 9), "target": tokens(29, 3, 9, seed=4)}
    result = train(tf.data.Dataset.from_tensor_slices(data).batch(12))
    return result, [part.get_weights() for part in (source, target, cell, out)]


class MyModel(tf.keras.Model):
    """Maps characters to logits, optionally with the state."""

    def __init__(self, vocab_size: int, embedding_dim: int, rnn_units: int) -> None:
        super().__init__()
        self.units = rnn_units
        self.embedding = layers.Embedding(vocab_size, embedding_dim)
        self.gru = layers.GRU(rnn_units, return_sequences=True, return_state=True)
        self.dense = layers.Dense(vocab_size)

    def call(self, inputs: Any, states: Any = None, return_state: bool = False) -> Any:
        x = self.embedding(inputs)
        if states is None:
            states = tf.zeros((tf.shape(inputs)[0], self.units), dtype=x.dtype)
        x, states = self.gru(x, initial_state=states)
        x = self.dense(x)
        return (x, states) if return_state else x


@program
def text_generation(nano: Any, step: Any) -> Any:
    """Trains on characters with its own train step, mean metric per epoch (text_generation)."""
    model = MyModel(10, 4, 6)
    optimizer = tf.keras.optimizers.Adam()
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class CustomTraining:
        def __init__(self, model):
            self.model = model
            self.batches_seen = 0

        def train_step(self, inputs):
            return update(*inputs)

    @step
    @tf.function
    def update(inputs, answers):
        with tf.GradientTape() as tape:
            predictions = model(inputs)
            loss = loss_fn(answers, predictions)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return {"loss": loss}

    @nano
    def train(dataset):
        training = CustomTraining(model)
        mean = tf.keras.metrics.Mean()
        shown = []
        for _epoch in range(2):
            mean.reset_state()
            for inp, target in dataset:
                logs = training.train_step([inp, target])
                mean.update_state(logs["loss"])
                training.batches_seen += 1
            shown.append(mean.result().numpy())
        return shown, training.batches_seen

    text = labels(25 * 6, 10).reshape(25, 6)
    sequences = tf.data.Dataset.from_tensor_slices(text).map(lambda row: (row[:-1], row[1:]))
    result = train(sequences.shuffle(30).batch(10, drop_remainder=True).prefetch(1))
    states = None
    word, written = tf.constant([[1]]), []
    for _ in range(3):
        logits, states = model(word, states=states, return_state=True)
        word = tf.argmax(logits, axis=-1)
        written.append(word)
    return result, written, [v.numpy() for v in model.trainable_variables]


@program
def state_carried_over(nano: Any, step: Any) -> Any:
    """Truncates backpropagation: the state after one piece of text starts the next piece."""
    embedding, cell, out = layers.Embedding(8, 4), layers.LSTMCell(5), layers.Dense(8)
    optimizer = tf.keras.optimizers.RMSprop(5e-3)

    @step
    @tf.function
    def train_step(words, h, c):
        with tf.GradientTape() as tape:
            loss = 0.0
            for t in range(words.shape[1] - 1):
                y, (h, c) = cell(embedding(words[:, t]), [h, c])
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(words[:, t + 1], out(y))
                loss += tf.reduce_mean(losses)
        variables = [v for part in (embedding, cell, out) for v in part.trainable_variables]
        gradients = tape.gradient(loss, variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss, norm, h, c

    @nano
    def train(text):
        h = tf.zeros((len(text), 5), dtype=tf.float64)
        c = tf.zeros((len(text), 5), dtype=tf.float64)
        losses, norms = [], []
        for start in range(0, 12, 4):
            loss, norm, h, c = train_step(text[:, start : start + 4], h, c)
            losses.append(loss)
            norms.append(norm)
        return losses, norms, h, c

    result = train(tf.constant(labels(7 * 12, 8).reshape(7, 12)))
    return result, [part.get_weights() for part in (embedding, cell, out)]


@program
def gru_with_masking(nano: Any, step: Any) -> Any:
    """Passes mask_zero through a GRU into a classifier; a metric outside the step."""
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(None,), dtype="int64"),
            layers.Embedding(12, 4, mask_zero=True),
            layers.GRU(5, return_sequences=True),
            layers.GRU(4),
            layers.Dense(3),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(1e-2)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @step
    @tf.function
    def train_step(words, answers):
        with tf.GradientTape() as tape:
            logits = model(words, training=True)
            loss = loss_fn(answers, logits)
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        return loss, logits

    @nano
    def train(words, answers):
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        losses = []
        for start in range(0, len(words), 13):
            x, y = words[start : start + 13], answers[start : start + 13]
            loss, logits = train_step(x, y)
            losses.append(float(loss))
            accuracy.update_state(y, logits)
        return losses, float(accuracy.result())

    return train(tokens(33, 4), labels(33)), model.get_weights()


@program
def lstm_autoencoder(nano: Any, step: Any) -> Any:
    """Passes the encoder's state by return_state to a decoder fed with a repeated vector."""
    encoder = layers.LSTM(4, return_state=True)
    decoder = layers.LSTM(4, return_sequences=True)
    repeat, head = layers.RepeatVector(4), layers.TimeDistributed(layers.Dense(2))
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(series):
        with tf.GradientTape() as tape:
            output, h, c = encoder(series)
            restored = head(decoder(repeat(output), initial_state=[h, c]))
            loss = tf.reduce_mean(tf.abs(restored - series[:, ::-1]))
        variables = []
        for part in (encoder, decoder, head):
            variables += part.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @nano
    def train(data, epochs):
        losses = []
        for _ in range(epochs):
            for series in data:
                losses.append(train_step(series))
        return losses

    data = batches(rows(26, 8).reshape(26, 4, 2))
    return train(data, 2), encoder.get_weights(), decoder.get_weights(), head.get_weights()


@program
def time_series_residual(nano: Any, step: Any) -> Any:
    """Windows from a long series, a model that predicts the change (tutorials/structured_data)."""

    class ResidualWrapper(tf.keras.Model):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def call(self, inputs, *args, **kwargs):
            return inputs + self.model(inputs, *args, **kwargs)

    @nano
    def compile_and_fit(series):
        mean, deviation = series[:40].mean(axis=0), series[:40].std(axis=0)
        normal = (series - mean) / deviation
        windows = np.stack([normal[i : i + 6] for i in range(len(normal) - 5)])
        model = ResidualWrapper(
            tf.keras.Sequential(
                [
                    layers.SimpleRNN(4, return_sequences=True),
                    layers.Dense(2, kernel_initializer="zeros"),
                ]
            )
        )
        optimizer = tf.keras.optimizers.Adam(1e-2)
        loss_fn = tf.keras.losses.Huber()
        error = tf.keras.metrics.MeanAbsoluteError()

        @step
        @tf.function
        def train_step(inputs, answers):
            with tf.GradientTape() as tape:
                predictions = model(inputs, training=True)
                loss = loss_fn(answers, predictions)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            error.update_state(answers, predictions)
            return loss

        dataset = tf.data.Dataset.from_tensor_slices(windows).shuffle(64).batch(16)
        dataset = dataset.map(lambda window: (window[:, :-1], window[:, 1:]))
        losses = [train_step(inputs, answers) for inputs, answers in dataset]
        return losses, error.result(), [v.numpy() for v in model.trainable_variables]

    return compile_and_fit(np.cumsum(rows(50, 2), axis=0))


@program
def autoregressive_forecast(nano: Any, step: Any) -> Any:
    """Runs a FeedBack model: warm up on a window, then a loop of predictions fed back."""

    class FeedBack(tf.keras.Model):
        def __init__(self, units, out_steps):
            super().__init__()
            self.out_steps = out_steps
            self.lstm_cell = layers.LSTMCell(units)
            self.lstm_rnn = layers.RNN(self.lstm_cell, return_state=True)
            self.dense = layers.Dense(2)

        def warmup(self, inputs):
            x, *state = self.lstm_rnn(inputs)
            return self.dense(x), state

        def call(self, inputs, training=None):
            predictions = []
            prediction, state = self.warmup(inputs)
            predictions.append(prediction)
            for _ in range(1, self.out_steps):
                x, state = self.lstm_cell(prediction, states=state, training=training)
                prediction = self.dense(x)
                predictions.append(prediction)
            return tf.transpose(tf.stack(predictions), [1, 0, 2])

    feedback = FeedBack(5, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @step
    @tf.function
    def train_step(window):
        with tf.GradientTape() as tape:
            predictions = feedback(window[:, :4], training=True)
            loss = tf.reduce_mean(tf.square(predictions - window[:, 4:]))
        variables = feedback.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @nano
    def train(windows):
        return [float(train_step(window)) for window in windows]

    losses = train(batches(rows(30, 14).reshape(30, 7, 2), size=12))
    return losses, [v.numpy() for v in feedback.trainable_variables]
