"""Measures datasets that Python decodes: `python -m benchmarks.readers [--help]`.

A `PyDataset` decodes hexadecimal text, number by number, as a parser written in Python does. A
small model trains on it in one process: plain Keras, Keras's own processes (`workers=N,
use_multiprocessing=True`) and `read_processes=N`. Epochs are interleaved, each kind in a `fit` of
its own; the first `fit` of each is not counted. The time is that of the whole call, so it includes
starting the processes, as every user's call does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import nanotf
from benchmarks import report
from nanotf.compat.versions import is_keras_3

BATCH, FEATURES = 64, 256
_Base: Any = tf.keras.utils.Sequence


class Decoded(_Base):  # type: ignore[misc]
    """Rows of hexadecimal text.

    Args:
        batches: int, in an epoch.
        **keras: `workers` and `use_multiprocessing` of Keras 3's `PyDataset`.
    """

    def __init__(self, batches: int, **keras: Any) -> None:
        super().__init__(**keras)
        numbers = np.random.default_rng(0).integers(0, 2**16, (batches * BATCH, FEATURES))
        self.lines = [" ".join(f"{number:04x}" for number in row) for row in numbers]

    def __len__(self) -> int:
        return len(self.lines) // BATCH

    def __getitem__(self, index: int) -> Any:
        lines = self.lines[index * BATCH : (index + 1) * BATCH]
        rows = [[int(word, 16) / 65536 for word in line.split()] for line in lines]
        x = np.array(rows, "float32")
        return x, x.mean(axis=1, keepdims=True)


def _model() -> Any:
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = nanotf.Sequential(
        [layers.Input((FEATURES,)), layers.Dense(64, activation="relu"), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


def compare(readers: int, batches: int, rounds: int) -> list[dict[str, Any]]:
    """Compares the ways to read, interleaved.

    Args:
        readers: int, processes that read.
        batches: int, in an epoch.
        rounds: int.

    Returns:
        list of dict, for each way: `reader`, its name; `seconds`, the median of a call; `ratios`,
        Keras's processes / this way of each round.
    """
    own = {"workers": readers, "use_multiprocessing": True}
    in_data, in_fit = (own, {}) if is_keras_3() else ({}, own)
    plain, processes = Decoded(batches), Decoded(batches, **in_data)
    model = _model()
    ways: dict[str, Callable[[], Any]] = {
        "one process": lambda: model.fit(plain, verbose=0),
        f"Keras, workers={readers}, use_multiprocessing": lambda: model.fit(
            processes, verbose=0, **in_fit
        ),
        f"nanotf, read_processes={readers}": lambda: model.fit(
            plain, verbose=0, read_processes=readers
        ),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            if number > 0:
                times[way].append(time.perf_counter() - began)
    keras = times[list(ways)[1]]
    return [
        {
            "reader": way,
            "batches": batches,
            "seconds": statistics.median(found),
            "ratios": [theirs / ours for theirs, ours in zip(keras, found, strict=True)],
        }
        for way, found in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=4, help="processes that read, default 4")
    parser.add_argument("--batches", type=int, default=200, help="in an epoch, default 200")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved runs, default 3")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    rows = compare(options.readers, options.batches, options.rounds)
    nanotf.shutdown()
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"Decoding in Python, {os.cpu_count()} logical CPUs\n" + report.reading(rows))


if __name__ == "__main__":
    main()
