"""Runs many jobs in a row on one warm pool, and records memory and descriptors after each job."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import psutil
import tensorflow as tf
from faults import rows, small_model

import nanotf
from nanotf.keras import nano, nano_multiprocessing


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Private memory in bytes and file descriptors of the processes of a pool."""

    memory: tuple[int, ...]
    descriptors: tuple[int, ...]

    @classmethod
    def now(cls) -> Footprint:
        """Measures the workers' private memory, and the descriptors of workers and parent."""
        workers = [psutil.Process(pid) for pid in nanotf.worker_pids()]
        return cls(
            tuple(worker.memory_full_info().uss for worker in workers),
            tuple(process.num_fds() for process in [*workers, psutil.Process()]),
        )


def warm_jobs(rounds: int) -> list[Footprint]:
    """Runs a `fit`, an `evaluate`, a `predict` and a `@nano` call per round.

    Returns the footprint after each round.
    """
    x, y = (array.astype(np.float32) for array in rows(4000))
    model = small_model("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(400)

    @nano_multiprocessing
    @tf.function
    def step(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x) - y))

    @nano(num_processes=2)
    def loop(batches: Any) -> float:
        return sum(float(step(x, y)) for x, y in batches)

    footprints = []
    for _ in range(rounds):
        model.fit(x, y, batch_size=400, verbose=0, num_processes=2)
        model.evaluate(x, y, batch_size=400, verbose=0, num_processes=2)
        model.predict(x, batch_size=400, verbose=0, num_processes=2)
        loop(data)
        footprints.append(Footprint.now())
    return footprints


def new_models(rounds: int) -> list[Footprint]:
    """Trains a new model per round; returns the footprint after each."""
    x = np.random.default_rng(0).random((64, 16, 16, 3)).astype(np.float32)
    y, layers = np.arange(64) % 10, tf.keras.layers
    footprints = []
    for _ in range(rounds):
        model = nanotf.keras.Sequential(
            [
                layers.Input((16, 16, 3)),
                layers.Conv2D(8, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dropout(0.1),
                layers.Dense(10),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
        model.fit(x, tf.one_hot(y, 10), batch_size=32, verbose=0, num_processes=2)
        footprints.append(Footprint.now())
    return footprints
