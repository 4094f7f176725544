"""`nanotf.smp`: models in partitions, microbatches and copies, exact or refused."""

from __future__ import annotations

import pathlib

import pytest
from processes import run_ranks

pytestmark = pytest.mark.both_generations

PROGRAM = pathlib.Path(__file__).with_name("smp_models.py")
# Partitions, microbatches, pipeline. Two ranks: with one partition, two copies of the model.
CASES = {
    2: ("2,2,interleaved", "1,2,interleaved"),
    -2: ("2,1,simple", "2,2,simple", "2,4,interleaved", "1,1,simple", "1,4,simple"),
    4: ("2,1,simple",),
    -4: ("2,2,interleaved",),
}
THOROUGH = [pytest.param(ranks, marks=pytest.mark.thorough) for ranks in list(CASES)[1:]]


@pytest.mark.parametrize("ranks", [2, *THOROUGH])
def test_models_train_as_one_process(ranks: int, tmp_path: pathlib.Path) -> None:
    """Noise, dropout, frozen and shared layers; files, summaries, errors of a part of a model."""
    done = run_ranks(PROGRAM, str(tmp_path), *CASES[ranks], ranks=abs(ranks))
    for rank in range(abs(ranks)):
        for line in (*CASES[ranks], "done"):
            assert f"rank {rank}: {line}" in done.stdout, done.stdout + done.stderr
