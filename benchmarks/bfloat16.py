"""Measures bfloat16 with its accuracy: `python -m benchmarks.bfloat16 [--seeds N]`.

Plain Keras trains two models on scikit-learn's digits: in float32, with the layers' policy
`mixed_bfloat16`, and with TensorFlow's pass over graphs, between which `tune=("bf16",)` chooses.
They take turns, a seed at a time, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import apart, report

MODELS = ("CNN", "MLP")
WAYS = ("float32", "policy", "graph pass")
PASS = "auto_mixed_precision_onednn_bfloat16"
EPOCHS, BATCH, SCALE, TEST_ROWS = 10, 64, 4, 450


def train(name: str, way: str, seed: int) -> dict[str, float]:
    """Trains a model in this process.

    Returns:
        A dict of `accuracy` (of 450 other digits) and `seconds` (processor time of an epoch after
        the first two, which trace).
    """
    import time

    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    keras, layers = tf.keras, tf.keras.layers
    keras.utils.set_random_seed(seed)
    if way == "policy":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    tf.config.optimizer.set_experimental_options({PASS: way == "graph pass"})
    digits = load_digits()
    images = np.repeat(np.repeat(digits.images, SCALE, 1), SCALE, 2)[..., None] / 16
    x, x_test, y, y_test = train_test_split(
        images.astype("float32"), digits.target, test_size=TEST_ROWS, random_state=0
    )
    hidden: list[Any] = [layers.Flatten()]
    if name == "CNN":
        for _ in range(2):
            hidden += [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()]
        hidden = [*hidden[1:], hidden[0]]
    else:
        hidden += [layers.Dense(1024, activation="relu") for _ in range(2)]
    # Logits in float32, as Keras's guide to mixed precision has them.
    logits = layers.Dense(10, dtype="float32")
    model = keras.Sequential([keras.Input(x.shape[1:]), *hidden, logits])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    ends: list[float] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.process_time()))
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[note])
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return {"accuracy": accuracy, "seconds": (ends[-1] - ends[1]) / (EPOCHS - 2)}


def compare(seeds: int) -> list[dict[str, Any]]:
    """Trains each model in each way.

    Returns:
        A list of dicts with `model`, `way`, `seconds` (median) and `accuracies` (by seed).
    """
    here = "benchmarks.bfloat16"
    found = [
        (name, {way: apart.run(here, "--one", name, way, seed) for way in WAYS})
        for name in MODELS
        for seed in range(seeds)
    ]
    return [
        {
            "model": name,
            "way": way,
            "seconds": statistics.median(f[way]["seconds"] for n, f in found if n == name),
            "accuracies": [f[way]["accuracy"] for n, f in found if n == name],
        }
        for name in MODELS
        for way in WAYS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bfloat16", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WAY", "SEED"), help="print its JSON")
    options = parser.parse_args(arguments)
    if options.one:
        name, way, seed = options.one
        print(json.dumps(train(name, way, int(seed))))
        return
    print(report.precisions(compare(options.seeds)))


if __name__ == "__main__":
    main(sys.argv[1:])
