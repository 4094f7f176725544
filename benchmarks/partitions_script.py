"""Run by `benchmarks.partitions`, in each rank: trains a model in parts; rank 0 prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf import smp

SKIPPED = 4  # steps: tracing, memory, the comparison of data


class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the time at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def main(
    partitions: int, microbatches: int, pipeline: str, units: int, rows: int, depth: int
) -> None:
    """Trains for some steps."""
    layers = tf.keras.layers
    hidden = [layers.Dense(units, activation="relu") for _ in range(depth)]
    model = tf.keras.Sequential([tf.keras.Input((units,)), *hidden, layers.Dense(10)])
    model = smp.DistributedModel.from_keras(
        model, partitions=partitions, microbatches=microbatches, pipeline=pipeline
    )
    model.compile("adam", "mse")
    random, clock = np.random.default_rng(0), Clock()
    x = random.normal(size=(rows, units)).astype("float32")
    y = random.normal(size=(rows, 10)).astype("float32")
    model.fit(x, y, batch_size=rows, epochs=SKIPPED + 8, verbose=0, callbacks=[clock])
    report = smp.last_report()
    if smp.rank() == 0:
        steps = np.diff(clock.ends[SKIPPED - 1 :])
        found = {
            "partitions": partitions,
            "microbatches": microbatches,
            "pipeline": pipeline if partitions > 1 else None,
            "seconds": statistics.median(steps),
            "fastest": min(steps),
            "weights": [each.weight_bytes for each in report.ranks],
            "others": [each.other_variable_bytes for each in report.ranks],
            "peaks": [each.peak_bytes for each in report.ranks],
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
