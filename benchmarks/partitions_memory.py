"""Run by `benchmarks.partitions`: trains in a plain script, and prints JSON about the memory.

The processes are this one and those that `fit` starts. A small model trains first, so that what
libraries take counts for neither. Of the large one's memory, private is what only one process
has (anonymous memory; a page that forks share counts in parts), and shared is memory files that
processes map. Two calls of `fit`: the second begins with slots.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from nanotf import smp

SMALL, EPOCHS, SAMPLING_SECONDS = 8, 4, 0.05


def memory_of(pid: int) -> dict[str, int]:
    """Returns the bytes of a process's memory, of the kinds "Pss_Anon" and "Pss_Shmem"."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = (line.split() for line in text.splitlines()[1:])
    return {kind[:-1]: 1024 * int(size) for kind, size, _ in lines if kind.startswith("Pss_")}


class TreeSampler:
    """Context manager that samples the memory of this process and of all that it has started.

    Attributes:
        samples: list of the bytes by process, see `memory_of`.
    """

    def __init__(self) -> None:
        self.samples: list[dict[int, dict[str, int]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(SAMPLING_SECONDS):
            found = {}
            for process in (own := psutil.Process(), *own.children(recursive=True)):
                with contextlib.suppress(OSError):
                    found[process.pid] = memory_of(process.pid)
            self.samples.append(found)

    def __enter__(self) -> TreeSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def peaks(self) -> dict[str, int]:
        """Returns the largest sums and the largest process, in bytes."""
        private = [[each["Pss_Anon"] for each in sample.values()] for sample in self.samples]
        # In the middle of the call, when ranks train and this process waits.
        middle = self.samples[len(self.samples) // 2]
        return {
            "private": max(map(sum, private)),
            "largest": max(map(max, private)),
            "parent": middle[os.getpid()]["Pss_Anon"],
            "shared": max(sum(e["Pss_Shmem"] for e in s.values()) for s in self.samples),
        }


def train(
    partitions: int, microbatches: int, units: int, rows: int, depth: int
) -> list[dict[str, int]]:
    """Trains a model of equal layers with Adam; returns the `peaks` of two calls of `fit`."""
    layers = tf.keras.layers
    hidden = [layers.Dense(units, activation="relu") for _ in range(depth)]
    model: Any = tf.keras.Sequential([tf.keras.Input((units,)), *hidden, layers.Dense(10)])
    if partitions:
        model = smp.DistributedModel.from_keras(
            model, partitions=partitions, microbatches=microbatches
        )
    model.compile("adam", "mse")
    random, found = np.random.default_rng(0), []
    x = random.normal(size=(rows, units)).astype("float32")
    y = random.normal(size=(rows, 10)).astype("float32")
    for _ in range(2):
        with TreeSampler() as sampler:
            model.fit(x, y, batch_size=rows, epochs=EPOCHS, verbose=0)
        found.append(sampler.peaks())
    return found


def main(partitions: int, microbatches: int, units: int, rows: int, depth: int) -> None:
    """Trains a small model and a large one; 0 partitions: with Keras alone, in this process."""
    small = train(partitions, microbatches, SMALL, rows, depth)[-1]
    calls = train(partitions, microbatches, units, rows, depth)
    larger = [{name: each[name] - small[name] for name in small} for each in calls]
    worst = {name: max(each[name] for each in larger) for name in small}
    print(json.dumps({"partitions": partitions, "microbatches": microbatches, **worst}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
