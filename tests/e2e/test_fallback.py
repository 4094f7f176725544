"""Workers exchange gradients in pure Python if TensorFlow cannot load the native ops."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import nanotf
from nanotf.collectives import native_status

pytestmark = [
    pytest.mark.own_pool,
    pytest.mark.skipif(not native_status()[0], reason=native_status()[1]),
]

SCRIPT = """
import numpy as np
import tensorflow as tf
from nanotf.keras import Sequential
x = np.arange(40.0).reshape(20, 2) / 40
for n in (None, 2):
    layers = tf.keras.layers
    model = Sequential([layers.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    history = model.fit(x, x[:, 0], epochs=2, shuffle=False, verbose=0, num_processes=n)
    print("LOSSES", *history.history["loss"])
"""


@pytest.mark.thorough
def test_ops_that_tensorflow_cannot_load(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "nanotf"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(pathlib.Path(nanotf.__file__).parent, package, ignore=ignored)
    (package / "collectives" / "_ops.so").write_bytes(b"not a library")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environ.pop("NANOTF_NATIVE", None)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        cwd=tmp_path,
        env=environ,
    )
    plain, shared = (
        [float(loss) for loss in line.split()[1:]]
        for line in run.stdout.splitlines()
        if line.startswith("LOSSES")
    )
    assert shared == pytest.approx(plain, rel=1e-4)
    said = [line for line in run.stderr.splitlines() if "in pure Python" in line]
    assert len(said) == 1, run.stderr
    assert "TensorFlow cannot load _ops.so" in said[0]
