"""Run by `test_smp_memory.py`: prints the memory of a script whose `fit` trains in two ranks."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import tensorflow as tf

from nanotf import smp

# Of 16 MiB each: the allocator keeps such memory once it is freed.
UNITS, LAYERS = 2048, 8


def private_bytes() -> int:
    """Returns the bytes of this process's anonymous memory."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [tf.keras.Input((UNITS,)), *(layers.Dense(UNITS) for _ in range(LAYERS))]
    )
    weights = 4 * model.count_params()
    model = smp.DistributedModel.from_keras(model, partitions=2)
    model.compile(tf.keras.optimizers.SGD(1e-6, momentum=0.9), "mse")
    data, found = np.ones((8, UNITS), np.float32), [private_bytes()]
    for _ in range(2):  # the second call begins with slots
        model.fit(data, data, verbose=0)
        found.append(private_bytes())
    assert len(model.get_weights()) == 2 * LAYERS
    print(json.dumps({"weights": weights, "private": found}))


main()
