"""Measures memory of all processes of a contestant, and the price of a 1 GB array.

The sum of proportional set sizes counts a page once, however many processes map it. Reading
`/proc/PID/smaps_rollup` stops a process for some milliseconds, so nothing is timed at the same
time.

The 1 GB array: a fresh process trains a small model on 16 MB and then on 1 GB of rows, with nanotf.
The difference is the user's own array plus nanotf's memory; both calls run on the same warm
workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from benchmarks import apart

ROW_FLOATS = 1024
SMALL_BYTES = 16 << 20
SAMPLING_SECONDS = 0.05


def used_bytes(pids: Sequence[int]) -> int:
    """Returns the summed proportional set sizes of processes and all their descendants."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            processes += [root, *root.children(recursive=True)]
    total = 0
    with _at_rest(processes):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


@contextlib.contextmanager
def _at_rest(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stops processes, except this one, for a moment.

    If a second process mapped a page between the two readings, the page would count one and a half
    times: 0.3 GB for a 1 GB array that two workers begin to read.
    """
    others = [process for process in processes if process.pid != os.getpid()]
    try:
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        yield
    finally:
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.resume()


class Sampler:
    """Context manager that samples the memory of processes; `peak` is the maximum, in bytes.

    Args:
        pids: sequence of int; their descendants count too.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self.peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)

    def _sample(self) -> None:
        while not self._end.is_set():
            self.peak = max(self.peak, used_bytes(self.pids))
            self._end.wait(SAMPLING_SECONDS)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def measure(num_processes: int, nbytes: int = 1 << 30) -> dict[str, Any]:
    """Measures the memory and time of training on an array, beyond the parent's own copy.

    Returns:
        A dict of `array_bytes`, `extra_bytes` (at the peak, beyond the user's array) and
        `seconds` (of the call, with one epoch).

    Raises:
        RuntimeError: The process failed.
    """
    result: dict[str, Any] = apart.run("benchmarks.memory", num_processes, nbytes)
    return result


def _main(num_processes: int, nbytes: int) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import numpy as np
    import tensorflow as tf

    from nanotf.keras import Sequential

    layers = tf.keras.layers
    model = Sequential([layers.Input((ROW_FLOATS,)), layers.Dense(1)])
    model.compile("sgd", "mse")

    def fit(array_bytes: int) -> tuple[int, float]:
        rows = array_bytes // (4 * ROW_FLOATS)
        x, y = np.ones((rows, ROW_FLOATS), np.float32), np.ones(rows, np.float32)
        begin = time.monotonic()
        with Sampler([os.getpid()]) as sampler:
            model.fit(x, y, batch_size=1024, verbose=0, num_processes=num_processes)
        return sampler.peak, time.monotonic() - begin

    fit(SMALL_BYTES)
    before, _ = fit(SMALL_BYTES)
    after, seconds = fit(nbytes)
    # Each peak includes the user's array and nanotf's memory.
    extra = after - before - (nbytes - SMALL_BYTES)
    print(json.dumps({"array_bytes": nbytes, "extra_bytes": extra, "seconds": seconds}))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
