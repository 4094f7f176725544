"""The probability of a click from sparse and dense features."""

import json

import numpy as np
import tensorflow as tf
from deepctr.feature_column import DenseFeat, SparseFeat, get_feature_names
from deepctr.models import DeepFM

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
columns = [SparseFeat("user", 9, 4), SparseFeat("item", 12, 4), DenseFeat("price", 1)]
given = {
    "user": rows.integers(0, 9, 70),
    "item": rows.integers(0, 12, 70),
    "price": rows.normal(size=70).astype("float32"),
}
y = rows.integers(0, 2, 70)
model = DeepFM(columns, columns, dnn_hidden_units=(8,), seed=1)
model.compile("adam", "binary_crossentropy", metrics=["AUC"])
x = {name: given[name] for name in get_feature_names(columns)}
history = model.fit(x, y, batch_size=12, epochs=3, verbose=0).history
print(json.dumps([history, model.predict(x, verbose=0).tolist()]))
