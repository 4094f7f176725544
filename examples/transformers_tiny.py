"""A tiny Hugging Face model, trained by a script that does not know nanotf.

    TF_USE_LEGACY_KERAS=1 nanotf run -n 2 examples/transformers_tiny.py

Needs `pip install "nanotf[transformers]"` and `pip install --no-deps tf_keras`; no network. The
model starts with random weights and learns if a sentence has more words above 50 than below.
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from transformers import BertConfig, TFBertForSequenceClassification

tf.keras.utils.set_random_seed(0)
words = np.random.default_rng(0).integers(2, 100, size=(1600, 15))
labels = (words > 50).sum(axis=1) > 7
data = {"input_ids": words, "attention_mask": np.ones_like(words), "labels": labels.astype("int64")}
train = {name: values[:1280] for name, values in data.items()}
test = {name: values[1280:] for name, values in data.items()}

config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=15,
)
model = TFBertForSequenceClassification(config)
model.compile(tf.keras.optimizers.Adam(3e-3))  # without a loss: the model's own
model.fit(train, batch_size=64, epochs=6, verbose=2)

logits = model.predict(test, batch_size=64, verbose=0).logits
print(f"accuracy on new sentences: {np.mean(logits.argmax(axis=1) == test['labels']):.3f}")
