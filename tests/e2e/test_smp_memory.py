"""`nanotf.smp` trains in less memory."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("microbatch_memory.py")


def test_four_microbatches_need_less_memory_than_one() -> None:
    """Only one microbatch's activations exist at a time."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert peaks["1"] > 100 * 2**20, peaks  # the activations of the whole batch
    assert peaks["4"] < 0.6 * peaks["1"], peaks
