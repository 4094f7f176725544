"""A search of structures for rows of numbers."""

import json
import tempfile

import autokeras
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1)
rows = np.random.default_rng(0)
x, y = rows.normal(size=(64, 5)).astype("float32"), rows.normal(size=(64, 1)).astype("float32")
with tempfile.TemporaryDirectory() as folder:
    search = autokeras.AutoModel(
        inputs=autokeras.Input(),
        outputs=autokeras.RegressionHead(),
        max_trials=2,
        directory=folder,
        seed=3,
    )
    history = search.fit(x, y, epochs=2, batch_size=16, validation_split=0.25, verbose=0).history
    predicted = search.predict(x[:7], verbose=0)
print(json.dumps([history, predicted.tolist()]))
