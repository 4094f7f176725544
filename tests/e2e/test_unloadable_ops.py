"""Workers of a TensorFlow that cannot load the native ops call the collectives through Python."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from processes import SECONDS

import nanotf

pytestmark = pytest.mark.own_pool

# With Adam, the update is divided: gradients take a reduce-scatter, weights a gather. With SGD,
# workers exchange the rows of a table that each has changed.
SCRIPT = """
import json
import numpy as np
import tensorflow as tf
from nanotf.keras import Sequential
x = np.arange(40.0).reshape(20, 2) / 40
for n in (None, 2):
    layers = tf.keras.layers
    model = Sequential([layers.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    history = model.fit(x, x[:, 0], epochs=2, shuffle=False, verbose=0, num_processes=n)
    tf.keras.utils.set_random_seed(5)
    table = layers.Embedding(91, 17)
    inputs = layers.Input((2,), dtype="int32")
    lookup = Sequential([inputs, table, layers.Flatten(), layers.Dense(1)])
    lookup.compile(tf.keras.optimizers.SGD(0.1), "mse")
    rows = (x * 80).astype("int32")
    losses = lookup.fit(rows, x[:, 0], epochs=3, shuffle=False, verbose=0, num_processes=n)
    print(json.dumps(history.history["loss"] + losses.history["loss"]))
report = history.nanotf
print(json.dumps([[worker.communication, worker.input] for worker in report.workers]))
print("Not measured here: input." in str(report))
"""


@pytest.mark.thorough
def test_ops_that_tensorflow_cannot_load(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "nanotf"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(pathlib.Path(nanotf.__file__).parent, package, ignore=ignored)
    (package / "collectives" / "_ops.so").write_bytes(b"not a library")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    plain, shared, times, is_said = run.stdout.splitlines()[-4:]
    assert json.loads(shared) == pytest.approx(json.loads(plain), rel=1e-4)
    assert all(exchanging > 0 and waiting is None for exchanging, waiting in json.loads(times))
    assert is_said == "True"
    (warning,) = [line for line in run.stderr.splitlines() if "through Python" in line]
    assert warning.startswith("nanotf: Steps call the collectives through Python, which is slower:")
    assert "TensorFlow cannot load _ops.so" in warning
