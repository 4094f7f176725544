"""`nanotf.smp` with two partitions: the training of one process, divided among two."""

from __future__ import annotations

import os
import pathlib

import pytest
from processes import run_ranks

pytestmark = pytest.mark.both_generations

PROGRAM = pathlib.Path(__file__).with_name("partitions.py")
CASES = {
    "float64": ("simple,manual,gradients,1", "interleaved,auto,tape,4"),
    "float64, more": (
        "simple,manual,tape,1",
        "simple,manual,gradients,2",
        "interleaved,manual,tape,4",
    ),
    "float32": ("interleaved,manual,tape,2", "simple,auto,gradients,4"),
}
THOROUGH = [pytest.param(name, marks=pytest.mark.thorough) for name in list(CASES)[1:]]


@pytest.mark.parametrize("name", ["float64", *THOROUGH])
def test_two_partitions_train_as_one_process(name: str, tmp_path: pathlib.Path) -> None:
    """Weights, losses and memory; reports; a whole model on disk; checkpoints; errors of a cut."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    done = run_ranks(PROGRAM, str(tmp_path), name.partition(",")[0], *CASES[name])
    for rank in (0, 1):
        for line in (*CASES[name], "done"):
            assert f"rank {rank}: {line}" in done.stdout, done.stdout + done.stderr
    if any(case.endswith(",1") for case in CASES[name]):  # one microbatch: partitions take turns
        assert done.stderr.count("2 partitions are slower than 1 would be") == 1, done.stderr
