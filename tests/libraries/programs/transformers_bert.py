"""A BERT from its configuration, with Keras's `fit` and the model's own loss."""

import json

import numpy as np
import tensorflow as tf
from transformers import BertConfig, TFBertForSequenceClassification

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
config = BertConfig(
    vocab_size=30,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=12,
    num_labels=2,
)
model = TFBertForSequenceClassification(config)
model.compile(tf.keras.optimizers.Adam(0.01), metrics=["accuracy"])
data = {
    "input_ids": rows.integers(0, 30, (40, 10)),
    "attention_mask": np.sort(rows.integers(0, 2, (40, 10)), 1)[:, ::-1].copy(),
    "labels": rows.integers(0, 2, 40),
}
batches = tf.data.Dataset.from_tensor_slices(data).batch(9)
history = model.fit(batches, epochs=3, verbose=0).history
print(json.dumps(history))
