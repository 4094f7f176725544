"""`nanotf run --ranks`: scripts of Horovod and tf.distribute, as two ranks and as one process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from processes import ROOT, last_json, run_python, run_ranks

from benchmarks.contestants import Contestant, ContestantError, Setting
from nanotf.machine import topology

pytestmark = [pytest.mark.both_generations, pytest.mark.own_pool]
HERE = pathlib.Path(__file__).parent
TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _needs_two_cores() -> None:
    if topology.usable_count() < 2:
        pytest.skip("two ranks need two cores")


def test_horovod_trains_as_one_process(tmp_path: pathlib.Path) -> None:
    found = last_json(run_ranks(HERE / "horovod_ranks.py", str(tmp_path), flag="--ranks"))
    assert len(found["differences"]) == 5
    assert max(found["differences"].values()) < TOLERANCE, found["differences"]
    for alone, ranks in found["losses"]:
        np.testing.assert_allclose(ranks, alone, rtol=TOLERANCE)
    assert found["unequal"] < TOLERANCE
    assert (
        "XLA compiles no exchanges between ranks. Received: jit_compile=True" in found["compiled"]
    )
    assert "all_reduce" in found["unlike"] and "broadcast" in found["unlike"]


@pytest.mark.parametrize("made", ["MirroredStrategy"])
def test_a_strategy_trains_as_one_process(made: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "alone").mkdir()
    script = HERE / "strategy_script.py"
    found = last_json(run_ranks(script, str(tmp_path / "ranks"), made, flag="--ranks"))
    text = run_python(tmp_path, script, str(tmp_path / "alone"), made)
    _compare(found, json.loads(text.splitlines()[-1]))


@pytest.mark.thorough
@pytest.mark.parametrize("made", [("OneDeviceStrategy", "cpu:0")])
def test_other_strategies(made: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "alone").mkdir()
    script = HERE / "strategy_script.py"
    found = last_json(run_ranks(script, str(tmp_path / "ranks"), *made, flag="--ranks"))
    text = run_python(tmp_path, script, str(tmp_path / "alone"), *made)
    _compare(found, json.loads(text.splitlines()[-1]))


def _compare(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found.pop("replicas") == 2 and alone.pop("replicas") == 1
    assert found["files"] == alone["files"]  # written once
    assert found["resumed"] == alone["resumed"]
    assert alone["resumed"][0] == [1, 2]
    assert found["logged"] == alone["logged"] == ["epoch", "0", "1"]
    for name in ("evaluated", "predicted", "loop", "gathered"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-8, err_msg=name)
    for name, values in alone["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-8, err_msg=name)


MULTI_WORKER = """
import json, os, sys
import numpy as np, tensorflow as tf
config = json.loads(os.environ["TF_CONFIG"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
assert (resolver.task_type, resolver.task_id) == ("worker", config["task"]["index"])
assert strategy.num_replicas_in_sync == len(config["cluster"]["worker"]) == 2
tf.keras.utils.set_random_seed(1)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
rows = np.ones((8, 4), "float32")
losses = model.fit(rows, rows[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"]
assert losses[1] < losses[0]
model.save(os.path.join(sys.argv[1], f"model-{resolver.task_id}.keras"))
print("done")
"""


@pytest.mark.thorough
def test_a_script_for_several_workers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(MULTI_WORKER)
    done = run_ranks(tmp_path / "script.py", str(tmp_path), flag="--ranks")
    assert done.stdout.splitlines()[-1] == "done"
    assert len(list(tmp_path.glob("model-*.keras"))) == 2


@pytest.mark.thorough
def test_the_benchmark_times_a_script_in_ranks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOTF_WORKER_LOGS", str(tmp_path / "logs"))
    contestant = Contestant("ranks", "mlp", Setting(2, tmp_path, batch_size=8))
    try:
        contestant.prepare(4)
        blocks = [contestant.run(4, 1) for _ in range(2)]
    finally:
        contestant.end()
    assert all(block.step is not None and block.step > 0 for block in blocks)
    with pytest.raises(ContestantError, match="KeyError"):
        Contestant("ranks", "no-such-model", Setting(2, tmp_path))


@pytest.mark.thorough
def test_ranks_that_wait_for_each_other_in_unlike_collectives(tmp_path: pathlib.Path) -> None:
    """One waits in a step, one outside: they have different keys, so neither sees the other."""
    (tmp_path / "script.py").write_text(
        "import tensorflow as tf, horovod.tensorflow as hvd\n"
        "hvd.init()\n"
        "reduce = tf.function(hvd.allreduce) if hvd.rank() else hvd.allreduce\n"
        "reduce(tf.constant([1.0]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "nanotf", "run", "--ranks", "-n", "2", tmp_path / "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NANOTF_WORKER_LOGS": str(tmp_path / "logs")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "All ranks must make the same collectives" in done.stderr
    assert "rank 0 waits for [1]" in done.stderr and "rank 1 waits for [0]" in done.stderr
