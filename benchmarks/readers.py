"""Measures datasets that Python decodes: `python -m benchmarks.readers [--help]`.

A `PyDataset` reads files of hexadecimal text and decodes them number by number, as a parser written
in Python does. A small model trains on it in one process: plain Keras, Keras's own processes
(`workers=N, use_multiprocessing=True`) and `read_processes=N`. The time is that of the whole call,
so it includes starting the processes, as every user's call does.

Cold: the first call of each way. In nanotf's, another process imports TensorFlow, from which later
calls fork their readers, too. Warm: the later calls, interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import nanotf
from benchmarks import report
from nanotf.compat.versions import is_keras_3

BATCH, FEATURES = 64, 1536  # 20 ms of decoding a batch (Python 3.11, 2 shared cores)
FILES = 8  # read again and again, so that the page cache holds them
_Base: Any = tf.keras.utils.Sequence


class Decoded(_Base):  # type: ignore[misc]
    """Batches from files of hexadecimal text.

    Args:
        files: list of str, one batch each.
        batches: int, in an epoch.
        **keras: `workers` and `use_multiprocessing` of Keras 3's `PyDataset`.
    """

    def __init__(self, files: list[str], batches: int, **keras: Any) -> None:
        super().__init__(**keras)
        self.files, self.batches = files, batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        text = pathlib.Path(self.files[index % len(self.files)]).read_text()
        rows = [[int(word, 16) / 65536 for word in line.split()] for line in text.splitlines()]
        x = np.array(rows, "float32")
        return x, x.mean(axis=1, keepdims=True)


def write(folder: pathlib.Path) -> list[str]:
    """Writes the files of the dataset; returns their paths."""
    random = np.random.default_rng(0)
    paths = [folder / f"{number}.txt" for number in range(FILES)]
    for path in paths:
        rows = random.integers(0, 2**16, (BATCH, FEATURES))
        path.write_text("\n".join(" ".join(f"{n:04x}" for n in row) for row in rows))
    return [str(path) for path in paths]


def _model() -> Any:
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = nanotf.Sequential(
        [layers.Input((FEATURES,)), layers.Dense(64, activation="relu"), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


def compare(files: list[str], readers: int, batches: int, rounds: int) -> list[dict[str, Any]]:
    """Compares the ways to read, interleaved.

    Args:
        files: list of str, the dataset's, see `write`.
        readers: int, processes that read.
        batches: int, in an epoch.
        rounds: int, warm calls of each way.

    Returns:
        list of dict, for each way: `reader`, its name; `cold`, the seconds of its first call;
        `seconds`, the median of its later calls; `ratios`, Keras's processes / this way of each
        round.
    """
    own = {"workers": readers, "use_multiprocessing": True}
    in_data, in_fit = (own, {}) if is_keras_3() else ({}, own)
    plain, processes = Decoded(files, batches), Decoded(files, batches, **in_data)
    model = _model()
    model.fit(Decoded(files, 2), verbose=0)  # traces the step, which no way of reading changes
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
    for _ in range(rounds + 1):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - began)
    keras = times[list(ways)[1]][1:]
    return [
        {
            "reader": way,
            "batches": batches,
            "cold": cold,
            "seconds": statistics.median(warm),
            "ratios": [theirs / ours for theirs, ours in zip(keras, warm, strict=True)],
        }
        for way, (cold, *warm) in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=4, help="processes that read, default 4")
    parser.add_argument("--batches", type=int, default=200, help="in an epoch, default 200")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved runs, default 3")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = write(pathlib.Path(folder))
        rows = compare(files, options.readers, options.batches, options.rounds)
    nanotf.shutdown()
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"Decoding in Python, {os.cpu_count()} logical CPUs\n" + report.reading(rows))


if __name__ == "__main__":
    main()
