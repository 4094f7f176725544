"""A language model whose attention is trained by LoRA, and generates a text."""

import json

import keras_hub
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
letters = ["<|endoftext|>", *"abcdefgh", "ab", "cd", "abcd"]
tokenizer = keras_hub.tokenizers.GPT2Tokenizer(
    vocabulary={token: number for number, token in enumerate(letters)},
    merges=["a b", "c d", "ab cd"],
)
backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=len(letters),
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
    max_sequence_length=8,
)
backbone.enable_lora(2)
model = keras_hub.models.GPT2CausalLM(
    backbone,
    preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8),
)
model.compile(
    tf.keras.optimizers.Adam(0.01),
    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
)
texts = np.array(["abcdef", "fedcba", "abab", "cdcdgh", "hgfe", "abcdabcd"] * 5)
history = model.fit(texts, batch_size=6, epochs=3, verbose=0).history
print(json.dumps([history, len(model.generate("ab", max_length=6))]))
