"""Adversarial regularization: a model around a model, with an own step."""

import json

import neural_structured_learning as nsl
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
x, y = rows.normal(size=(50, 6)).astype("float32"), rows.integers(0, 3, 50)
base = tf.keras.Sequential(
    [
        tf.keras.Input((6,), name="feature"),
        tf.keras.layers.Dense(8, activation="tanh"),
        tf.keras.layers.Dense(3, activation="softmax"),
    ]
)
config = nsl.configs.make_adv_reg_config(multiplier=0.2, adv_step_size=0.05)
model = nsl.keras.AdversarialRegularization(base, adv_config=config)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
data = {"feature": x, "label": y}
history = model.fit(data, batch_size=9, epochs=3, verbose=0).history
print(json.dumps([history, base.predict(x[:5], verbose=0).tolist()]))
