"""Measures the time until the first batch is done, as a user's script sees it.

A fresh process imports, builds the MLP and calls `fit` (cold), calls it again (warm), and trains
the CNN, which is new to its workers (new model on warm workers). Plain Keras does the same.
"""

from __future__ import annotations

from typing import Any

from benchmarks import ratios
from benchmarks.contestants import Contestant, Setting

STEPS = 20
WARM_CALLS = 5
NAMES = ("plain", "shm", "grpc")


def measure(name: str, setting: Setting) -> dict[str, Any]:
    """Measures the start of one contestant.

    Args:
        name: str, one of `NAMES`.
        setting: `contestants.Setting`.

    Returns:
        A dict of seconds: `import`, `cold`, `warm` (median), `new_model`; the last three from
        the call of `fit` to the end of its first step.
    """
    contestant = Contestant(name, "mlp", setting)
    try:
        contestant.prepare(STEPS)
        cold = contestant.run(STEPS, 1)
        warm = [contestant.run(STEPS, 1).first_batch for _ in range(WARM_CALLS)]
        contestant.change("cnn")
        contestant.prepare(STEPS)
        new_model = contestant.run(STEPS, 1)
    finally:
        contestant.end()
    return {
        "import": contestant.ready["import_s"],
        "cold": cold.first_batch,
        "warm": ratios.median(warm),
        "new_model": new_model.first_batch,
    }
