"""`nanotf compare`, on scripts whose numbers are equal and on one whose numbers are not."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
from processes import SECONDS

from nanotf.cli import recorded
from nanotf.cli.run import Script
from nanotf.parent import defaults

SCRIPT = """
import os, sys
import numpy as np
import tensorflow as tf
import nanotf
from nanotf.keras import nano, nano_multiprocessing

tf.keras.utils.set_random_seed(1)
layers = tf.keras.layers
model = tf.keras.Sequential(
    [layers.Input((4,)), layers.Dense(8, "tanh"), layers.Dropout(0.2), layers.Dense(1)]
)
model.compile("adam", "mse", metrics=["mae"])
x = np.random.rand(40, 4)
y = x.sum(1, keepdims=True) * FACTOR
model.fit(x, y, batch_size=9, epochs=9, validation_split=0.2)

@nano_multiprocessing
def step(batch):
    return tf.reduce_mean(model(batch) ** 2)

@nano(num_processes=2)
def loop():
    return [float(step(x[:n])) for n in (7, 8)]

loop()
"""


def _compare(folder: pathlib.Path, factor: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("FACTOR", factor))
    return subprocess.run(
        [sys.executable, "-m", "nanotf", "compare", "--steps", "3", str(script)],
        env=dict(os.environ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_equal(tmp_path: pathlib.Path) -> None:
    done = _compare(tmp_path, "1.0")
    assert done.returncode == 0, done.stdout + done.stderr
    for dtype in ("float64", "float32"):  # 3 steps of fit, 2 calls of step, 1 of loop
        assert f"{dtype}: equal at 6 moments" in done.stdout
    assert done.stdout.endswith("The numbers are equal.\n")


@pytest.mark.thorough
def test_unseeded(tmp_path: pathlib.Path) -> None:
    done = _compare(tmp_path, "int.from_bytes(os.urandom(2), 'big')")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "float64: they part at step 1 of fit 1" in done.stdout
    assert "Seed the script" in done.stdout


@pytest.mark.thorough
def test_another_path_with_workers(tmp_path: pathlib.Path) -> None:
    done = _compare(tmp_path, "(1.0 if os.environ.get('NANOTF_RECORD') and NUMBER == 1 else 2.0)")
    assert done.returncode == 1
    assert "the script fails in one process: it exited with code 1: NameError" in done.stdout
    assert "ran in no dtype" in done.stdout


def test_the_script_runs_as_it_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first of several hosts, `prepare` returns a script with the workers of all."""
    ran: list[Script] = []
    monkeypatch.setattr(Script, "prepare", lambda self: dataclasses.replace(self, num_processes=4))
    monkeypatch.setattr(Script, "run", lambda self: ran.append(self))
    monkeypatch.setattr(recorded, "_record_fits", lambda steps: None)
    monkeypatch.setattr(defaults, "alone", False)  # restores it
    options = {"number": 2, "dtype": "float32", "steps": 1, "is_module": False}
    recorded.main(options, "train.py", ())
    assert [script.num_processes for script in ran] == [4]
