"""Attention: translation, masked and causal language models, patches of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import batches, images, labels, rows, tokens
from tensorflow.keras import layers


def positional_encoding(length: int, depth: int) -> Any:
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(depth // 2)[None, :] / (depth / 2))
    return tf.constant(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1))


class PositionalEmbedding(layers.Layer):
    """Embeds words and their positions."""

    def __init__(self, vocabulary: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.embedding = layers.Embedding(vocabulary, depth)
        self.positions = positional_encoding(16, depth)

    def call(self, x: Any) -> Any:
        length = tf.shape(x)[1]
        embedded = self.embedding(x) * tf.sqrt(tf.cast(self.depth, tf.float64))
        return embedded + self.positions[tf.newaxis, :length, :]


class FeedForward(layers.Layer):
    """Two dense layers with a residual connection."""

    def __init__(self, depth: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.seq = tf.keras.Sequential(
            [layers.Dense(width, activation="relu"), layers.Dense(depth), layers.Dropout(dropout)]
        )
        self.add = layers.Add()
        self.norm = layers.LayerNormalization()

    def call(self, x: Any, training: Any = None) -> Any:
        return self.norm(self.add([x, self.seq(x, training=training)]))


class CustomSchedule(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Rises for some steps, then falls with the square root of the step."""

    def __init__(self, d_model: int, warmup_steps: int = 4) -> None:
        super().__init__()
        self.d_model = tf.cast(d_model, tf.float64)
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        step = tf.cast(step, dtype=tf.float64) + 1.0
        rising = step * (self.warmup_steps**-1.5)
        return 0.1 * tf.math.rsqrt(self.d_model) * tf.math.minimum(tf.math.rsqrt(step), rising)

    def get_config(self) -> Any:
        return {"d_model": int(self.d_model), "warmup_steps": self.warmup_steps}


class Transformer(tf.keras.Model):
    """One encoder layer and one decoder layer."""

    def __init__(self, vocabulary: int, depth: int = 8) -> None:
        super().__init__()
        self.source = PositionalEmbedding(vocabulary, depth)
        self.target = PositionalEmbedding(vocabulary, depth)
        self.encoder_attention = layers.MultiHeadAttention(2, key_dim=4, use_bias=False)
        self.encoder_feed = FeedForward(depth, 12)
        self.causal_attention = layers.MultiHeadAttention(2, key_dim=4, use_bias=False)
        self.cross_attention = layers.MultiHeadAttention(2, key_dim=4, use_bias=False)
        self.decoder_feed = FeedForward(depth, 12)
        self.norm = layers.LayerNormalization()
        self.final_layer = layers.Dense(vocabulary)

    def call(self, inputs: Any, training: Any = None) -> Any:
        context, x = inputs
        seen = tf.not_equal(context, 0)[:, tf.newaxis, :]
        context = self.source(context)
        attended = self.encoder_attention(context, context, attention_mask=seen)
        context = self.encoder_feed(context + attended, training=training)
        x = self.target(x)
        x = self.norm(x + self.causal_attention(x, x, use_causal_mask=True))
        x = self.norm(x + self.cross_attention(x, context, attention_mask=seen))
        return self.final_layer(self.decoder_feed(x, training=training))


def masked_loss(label: Any, pred: Any) -> Any:
    mask = label != 0
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, pred)
    mask = tf.cast(mask, dtype=loss.dtype)
    loss *= mask
    return tf.reduce_sum(loss) / tf.reduce_sum(mask)


def masked_accuracy(label: Any, pred: Any) -> Any:
    pred = tf.argmax(pred, axis=2)
    label = tf.cast(label, pred.dtype)
    mask = label != 0
    match = tf.cast((label == pred) & mask, dtype=tf.float64)
    return tf.reduce_sum(match) / tf.reduce_sum(tf.cast(mask, dtype=tf.float64))


@program
def translation_transformer(nano: Any, step: Any) -> Any:
    """Masked loss and accuracy, a custom schedule (tensorflow.org/text/tutorials/transformer)."""
    transformer = Transformer(12)
    learning_rate = CustomSchedule(8)
    optimizer = tf.keras.optimizers.Adam(learning_rate, beta_1=0.9, beta_2=0.98, epsilon=1e-9)
    train_loss = tf.keras.metrics.Mean(name="train_loss")
    train_accuracy = tf.keras.metrics.Mean(name="train_accuracy")
    train_step_signature = [
        tf.TensorSpec(shape=(None, None), dtype=tf.int64),
        tf.TensorSpec(shape=(None, None), dtype=tf.int64),
    ]

    @step
    @tf.function(input_signature=train_step_signature)
    def train_step(inp, tar):
        tar_inp = tar[:, :-1]
        tar_real = tar[:, 1:]
        with tf.GradientTape() as tape:
            predictions = transformer([inp, tar_inp], training=True)
            loss = masked_loss(tar_real, predictions)
        gradients = tape.gradient(loss, transformer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, transformer.trainable_variables, strict=True))
        train_loss(loss)
        train_accuracy(masked_accuracy(tar_real, predictions))

    @nano
    def train(pairs):
        shown = []
        for epoch in range(2):
            train_loss.reset_state()
            train_accuracy.reset_state()
            for batch, (inp, tar) in enumerate(pairs):
                train_step(inp, tar)
                if batch == 1:
                    shown.append((epoch, float(train_loss.result())))
            shown.append((float(train_loss.result()), float(train_accuracy.result())))
        return shown

    shown = train(batches(tokens(33, 6), tokens(33, 7, seed=5), size=14))
    return shown, [variable.numpy() for variable in transformer.trainable_variables]


@program
def masked_language_model(nano: Any, step: Any) -> Any:
    """Hides random words in the step and predicts them (keras.io/examples/nlp, masked BERT)."""
    VOCABULARY, LENGTH, DEPTH, MASK = 14, 6, 8, 13
    inputs = layers.Input((LENGTH,), dtype="int64")
    x = layers.Embedding(VOCABULARY, DEPTH)(inputs)
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=4)(query=x, value=x, key=x)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.add([x, layers.Dropout(0.1)(attended)]))
    x = layers.LayerNormalization(epsilon=1e-6)(layers.add([x, layers.Dense(DEPTH)(x)]))
    bert = tf.keras.Model(inputs, layers.Dense(VOCABULARY, activation="softmax")(x))
    optimizer = tf.keras.optimizers.Adam(2e-3)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(reduction="none")
    loss_tracker = tf.keras.metrics.Mean(name="loss")

    def get_masked_input_and_labels(sentences):
        chosen = tf.random.uniform(tf.shape(sentences), dtype=tf.float64) < 0.3
        chosen = tf.logical_and(chosen, sentences > 0)
        masked = tf.where(chosen, tf.constant(MASK, tf.int64), sentences)
        return masked, sentences, tf.cast(chosen, tf.float64)

    @step
    @tf.function
    def train_step(sentences):
        features, answers, sample_weight = get_masked_input_and_labels(sentences)
        with tf.GradientTape() as tape:
            predictions = bert(features, training=True)
            loss = loss_fn(answers, predictions, sample_weight=sample_weight)
            average = tf.reduce_sum(loss) / tf.reduce_sum(sample_weight)
        gradients = tape.gradient(average, bert.trainable_variables)
        optimizer.apply_gradients(zip(gradients, bert.trainable_variables, strict=True))
        loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": loss_tracker.result(), "masked": tf.reduce_sum(sample_weight)}

    @nano
    def train(dataset):
        return [train_step(sentences) for sentences in dataset]

    return train(batches(tokens(33, LENGTH, MASK))), bert.get_weights()


class Patches(layers.Layer):
    """Cuts images into squares."""

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size

    def call(self, pictures: Any) -> Any:
        sizes = [1, self.patch_size, self.patch_size, 1]
        patches = tf.image.extract_patches(pictures, sizes, sizes, [1, 1, 1, 1], "VALID")
        return tf.reshape(patches, [tf.shape(pictures)[0], -1, patches.shape[-1]])


class PatchEncoder(layers.Layer):
    """Projects patches and adds a learned vector per position."""

    def __init__(self, num_patches: int, depth: int) -> None:
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(units=depth)
        self.position_embedding = layers.Embedding(num_patches, depth)

    def call(self, patch: Any) -> Any:
        positions = tf.range(self.num_patches)
        return self.projection(patch) + self.position_embedding(positions)


@program
def vision_transformer(nano: Any, step: Any) -> Any:
    """Patches, attention blocks and weight decay (keras.io, image_classification_with_vit)."""

    class ViT(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.patches = Patches(4)
            self.encoder = PatchEncoder(4, 8)
            self.blocks = [
                (
                    layers.LayerNormalization(epsilon=1e-6),
                    layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.1),
                    layers.LayerNormalization(epsilon=1e-6),
                    layers.Dense(8, activation="gelu"),
                )
                for _ in range(1)
            ]
            self.first, self.second = (layers.LayerNormalization(), layers.Dense(3))

        def call(self, pictures, training=False):
            x = self.encoder(self.patches(pictures))
            for norm1, attention, norm2, dense in self.blocks:
                y = norm1(x)
                x = x + attention(y, y, training=training)
                x = x + dense(norm2(x))
            x = self.first(x)
            return self.second(tf.reshape(x, [tf.shape(x)[0], 4 * 8]))

    model = ViT()
    optimizer = tf.keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-2)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    entropy = tf.keras.metrics.SparseCategoricalCrossentropy(from_logits=True)

    @step
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_fn(y, logits)
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        entropy.update_state(y, logits)
        return loss

    @nano
    def train(x, y):
        losses = [train_step(*pair) for pair in batches(x, y, size=9)]
        return losses, entropy.result()

    return train(images(22), labels(22)), [w.numpy() for w in model.trainable_weights]


@program
def causal_language_model(nano: Any, step: Any) -> Any:
    """Trains a tiny GPT with tied weights on NumPy batches; the loop samples from a split."""
    VOCABULARY, LENGTH, DEPTH = 11, 7, 8

    @nano
    def train(text):
        embedding = layers.Embedding(VOCABULARY, DEPTH)
        places = layers.Embedding(LENGTH, DEPTH)
        attention = layers.MultiHeadAttention(2, DEPTH // 2)
        norm = layers.LayerNormalization()
        optimizer = tf.keras.optimizers.Adam(1e-2, global_clipnorm=1.0)

        def forward(words):
            x = embedding(words) + places(tf.range(words.shape[1]))
            x = norm(x + attention(x, x, use_causal_mask=True))
            return tf.matmul(x, embedding.embeddings, transpose_b=True)

        @step
        @tf.function
        def train_step(words):
            with tf.GradientTape() as tape:
                logits = forward(words[:, :-1])
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(words[:, 1:], logits)
                )
            parts = (embedding, places, attention, norm)
            variables = [v for part in parts for v in part.trainable_variables]
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        losses = []
        for _ in range(4):
            starts = np.random.randint(0, len(text) - LENGTH, size=9)
            words = np.stack([text[start : start + LENGTH] for start in starts])
            losses.append(train_step(tf.constant(words)).numpy())
        return losses, embedding.get_weights(), attention.get_weights(), norm.get_weights()

    return train(labels(80, VOCABULARY))


@program
def transformer_classifier(nano: Any, step: Any) -> Any:
    """A TransformerBlock on embedded tokens and positions, with class weights in the loop."""

    class TransformerBlock(layers.Layer):
        def __init__(self, depth, heads, rate=0.1):
            super().__init__()
            self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=depth)
            self.dense = layers.Dense(depth, activation="relu")
            self.norm1 = layers.LayerNormalization(epsilon=1e-6)
            self.norm2 = layers.LayerNormalization(epsilon=1e-6)
            self.dropout = layers.Dropout(rate)

        def call(self, inputs, training=None):
            attended = self.dropout(self.attention(inputs, inputs), training=training)
            out = self.norm1(inputs + attended)
            return self.norm2(out + self.dense(out))

    embedding, block = layers.Embedding(12, 6), TransformerBlock(6, 2)
    pooling, head = layers.GlobalAveragePooling1D(), layers.Dense(2)
    optimizer = tf.keras.optimizers.Nadam(5e-3)
    weights_of_classes = {0: 0.4, 1: 1.6}

    @step
    @tf.function
    def train_step(words, answers, weights):
        with tf.GradientTape() as tape:
            logits = head(pooling(block(embedding(words), training=True)))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(answers, logits)
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        parts = (embedding, block, head)
        variables = [v for part in parts for v in part.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss, logits

    @nano
    def train(dataset):
        losses, scores = [], []
        for words, answers in dataset:
            weights = np.array([weights_of_classes[int(answer)] for answer in answers])
            loss, logits = train_step(words, answers, weights)
            losses.append(loss)
            scores.append(tf.nn.softmax(logits).numpy())
        return losses, np.concatenate(scores)

    result = train(batches(tokens(36), labels(36, 2)))
    return result, embedding.get_weights(), block.get_weights(), head.get_weights()


@program
def set_attention(nano: Any, step: Any) -> Any:
    """Dot-product attention written with einsum in a tf.Module, rows attending to each other."""

    class Attention(tf.Module):
        def __init__(self, depth):
            super().__init__()
            shape = (depth, depth)
            self.q, self.k, self.v = [
                tf.Variable(tf.random.normal(shape, stddev=0.5, dtype=tf.float64)) for _ in range(3)
            ]

        def __call__(self, x):
            q, k, v = x @ self.q, x @ self.k, x @ self.v
            scores = tf.einsum("id,jd->ij", q, k) / np.sqrt(x.shape[-1])
            return tf.nn.softmax(scores, axis=-1) @ v

    attention = Attention(4)
    optimizer = tf.keras.optimizers.SGD(0.1, nesterov=True, momentum=0.5)

    @step
    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(attention(x) - tf.reduce_mean(x, axis=0)))
        grads = tape.gradient(loss, attention.trainable_variables)
        optimizer.apply_gradients(zip(grads, attention.trainable_variables, strict=True))
        return loss

    @nano
    def train(x):
        return [train_step(batch) for batch in batches(x, size=15)]

    return train(rows(40)), [variable.numpy() for variable in attention.trainable_variables]
