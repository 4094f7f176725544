"""Measures many small models: `python -m benchmarks.items [--processes N] [--models 8]`.

`nanotf.map` trains them against a loop in one process, joblib's loky and `multiprocessing.Pool`
(spawn). "cold" is a contestant's first call, with the start of its workers, "warm" the median of
later calls on the same workers, interleaved with the others'. This process has imported TensorFlow
before.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import report
from benchmarks.others import Others

ROWS, COLUMNS, EPOCHS = 2000, 64, 3
CALLS = 3  # after the cold one


def train(seed: int, x: Any, y: Any) -> float:
    """Trains a small MLP from scratch; returns its accuracy."""
    import tensorflow as tf

    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((COLUMNS,)), layers.Dense(64, "relu"), layers.Dense(2, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0)
    return float(model.evaluate(x, y, verbose=0)[1])


def _data() -> dict[str, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype("float32")
    return {"x": x, "y": (x.sum(axis=1) > 0).astype("int32")}


Call = Callable[[Sequence[int]], Sequence[float]]


class _Contestant:
    """A way to train the models.

    Args:
        name: str.
        call: callable of the seeds; returns the accuracies.
    """

    def __init__(self, name: str, call: Call) -> None:
        self._name, self._call = name, call
        self._seconds: list[float] = []
        self._shares: list[float] = []

    def measure(self, models: int) -> None:
        """Calls it once."""
        with Others(()) as others:
            begin = time.perf_counter()
            found = self._call(range(models))
            self._seconds.append(time.perf_counter() - begin)
        self._shares.append(others.share)
        if len(found) != models or min(found) < 0.8:
            raise RuntimeError(f"{self._name} returned other results: {found}")

    def row(self) -> dict[str, Any]:
        """Returns its row of the table."""
        cold, *warm = self._seconds
        return {
            "name": self._name,
            "cold": cold,
            "warm": statistics.median(warm),
            "others": max(self._shares),
        }


def measure_all(processes: int, models: int) -> list[dict[str, Any]]:
    """Measures all contestants, interleaved. Workers without work wait, asleep.

    Args:
        processes: int, number of workers.
        models: int, number of models of a call.

    Returns:
        A list of dicts with `name`, `cold` and `warm` (s for all models), and `others`, the largest
        share of the cores that other programs used during a call.
    """
    import joblib
    from joblib.externals.loky import get_reusable_executor

    import nanotf

    data = _data()
    job: Any = functools.partial(train, **data)

    def mapped(seeds: Sequence[int]) -> list[float]:
        return nanotf.map(train, seeds, processes, shared=data, verbose=0)

    def loky(seeds: Sequence[int]) -> list[float]:
        calls = (joblib.delayed(train)(seed, **data) for seed in seeds)
        return list(joblib.Parallel(n_jobs=processes, backend="loky")(calls))

    pools: list[Any] = []

    def pooled(seeds: Sequence[int]) -> list[float]:
        if not pools:
            pools.append(multiprocessing.get_context("spawn").Pool(processes))
        found: list[float] = pools[0].map(job, seeds, chunksize=1)
        return found

    contestants = [
        _Contestant("loop", lambda seeds: [job(seed) for seed in seeds]),
        _Contestant("nanotf.map", mapped),
        _Contestant("joblib, loky", loky),
        _Contestant("multiprocessing.Pool", pooled),
    ]
    try:
        for _ in range(1 + CALLS):
            for contestant in contestants:
                contestant.measure(models)
    finally:
        nanotf.shutdown()
        get_reusable_executor().shutdown(wait=True)
        for pool in pools:
            pool.terminate()
            pool.join()
    return [contestant.row() for contestant in contestants]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.items", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    # Workers import this module by its name, which `__main__` is not.
    from benchmarks import items

    rows = items.measure_all(options.processes, options.models)
    print(json.dumps(rows) if options.json else report.items(rows))


if __name__ == "__main__":
    main()
