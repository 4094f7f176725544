"""A classifier of texts with its preprocessor: `fit` tokenizes in its own `fit`."""

import json

import keras_hub
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
    keras_hub.tokenizers.BertTokenizer(vocabulary=words), sequence_length=8
)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(words),
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
    max_sequence_length=8,
)
model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor)
model.compile(
    "adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
texts = np.array(["a good film", "a bad film", "very good", "very very bad", "good bad good"] * 6)
labels = np.array([1, 0, 1, 0, 1] * 6)
history = model.fit(texts, labels, batch_size=8, epochs=3, verbose=0).history
print(json.dumps([history, model.evaluate(texts, labels, verbose=0)]))
