"""`nanotf.smp` trains in less memory."""

from __future__ import annotations

import json
import pathlib

from processes import run_python

PROGRAM = pathlib.Path(__file__).with_name("microbatch_memory.py")


def test_sixteen_microbatches_need_less_memory_than_one(tmp_path: pathlib.Path) -> None:
    """Only one microbatch's activations exist at a time."""
    peaks = json.loads(run_python(tmp_path, PROGRAM))
    assert peaks["1"] > 100 * 2**20, peaks  # the activations of the whole batch
    assert peaks["16"] < 0.5 * peaks["1"], peaks
