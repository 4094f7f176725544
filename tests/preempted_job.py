"""A program that trains with `resume` in a process of its own, and gets SIGTERM."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import subprocess
import sys
import threading
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 500.0  # a cold start of TensorFlow in the program and in two workers, on a busy machine

_PROGRAM = """
import os, signal, sys
import numpy as np
import tensorflow as tf
from nanotf.keras import Sequential

folder, processes, epochs, end_at = sys.argv[1], *map(int, sys.argv[2:])
tf.keras.backend.set_floatx("float64")
tf.keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(400, 8))
model = Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(4, "tanh"),
                    tf.keras.layers.Dense(1)])
model.compile("adam", "mse")

class Told(tf.keras.callbacks.Callback):
    nanotf_needs = "progress"
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        if epoch == end_at:
            os.kill(os.getpid(), signal.SIGTERM)

history = model.fit(x, x.sum(axis=1), batch_size=4, epochs=epochs, verbose=0,
                    validation_split=0.2, callbacks=[Told()], resume=folder,
                    num_processes=processes)
np.savez(folder + ".npz", *model.get_weights(), history.history["val_loss"])
"""


class Job:
    """A program that trains, in a process of its own, as a scheduler starts it.

    Args:
        directory: folder for the program and the checkpoints.
        name: str, of the folder of checkpoints.
        epochs: int.
    """

    def __init__(self, directory: pathlib.Path, name: str, epochs: int) -> None:
        self._script = directory / "job.py"
        self._script.write_text(_PROGRAM)
        self.folder, self._epochs = directory / name, epochs

    def start(self, processes: int, end_at: int = -1) -> subprocess.Popen[str]:
        """Starts it; it sends itself SIGTERM at the beginning of the epoch `end_at`."""
        return subprocess.Popen(
            [sys.executable, str(self._script), *self._arguments(processes, end_at)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, processes: int, end_at: int = -1) -> int:
        """Runs it; returns the exit code."""
        process = self.start(processes, end_at)
        process.communicate(timeout=SECONDS)
        return process.returncode

    def run_here(self) -> None:
        """Runs it in this process, which has imported TensorFlow already, without workers."""
        before, sys.argv = sys.argv, [str(self._script), *self._arguments(1, -1)]
        try:
            runpy.run_path(str(self._script))
        finally:
            sys.argv = before

    def _arguments(self, processes: int, end_at: int) -> list[str]:
        return [str(self.folder), str(processes), str(self._epochs), str(end_at)]

    def end_at_random(self, processes: int, random: np.random.Generator) -> int:
        """Runs it, with SIGTERM at a random moment; returns the exit code."""
        process = self.start(processes)
        assert process.stdout is not None
        epochs = 1 + random.integers(2)
        with process.stdout as lines:
            for line in lines:
                epochs -= line.startswith("epoch")
                if epochs == 0:  # any moment after it; no condition tells which
                    threading.Timer(random.uniform(0, 0.3), process.terminate).start()
        return process.wait(SECONDS)

    def result(self) -> list[Any]:
        with np.load(f"{self.folder}.npz") as found:
            return [found[name] for name in found.files]


def place(folder: pathlib.Path) -> tuple[int, int]:
    """Returns the epoch and the step of the newest checkpoint."""
    newest = max((folder / "nanotf-resume").glob("checkpoint-*"))
    content = json.loads((newest / "manifest.json").read_text())["content"]
    return content["epoch"], content["step"]


def assert_same_results(found: Job, expected: Job) -> None:
    for ours, theirs in zip(found.result(), expected.result(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)
