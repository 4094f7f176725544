"""`nanotf run --ranks` on two hosts: processes of this machine at 127.0.0.1 and 127.0.0.2."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hosts_run import ADDRESSES, HostsRun
from processes import ROOT, SECONDS

pytestmark = pytest.mark.own_pool

BY_FLAG = ["--ranks", "-n", "1", "--hosts", ",".join(ADDRESSES)]

# Of all ranks the same half of each batch is on the same host, in the order of ranks.
TRAINS = """
import json, os
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
places = hvd.allgather_object(
    [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
)
tf.keras.backend.set_floatx("float64")


def trained(optimizer, batch, x, y):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    model.fit(x, y, batch, 2, 0, shuffle=False)
    return model.get_weights()


x = np.random.default_rng(0).normal(size=(64, 8))
alone = trained(tf.keras.optimizers.Adam(0.01), 16, x, x[:, :3])
each = 16 // hvd.size()
mine = x.reshape(4, hvd.size(), each, 8)[:, hvd.rank()].reshape(-1, 8)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01))
ranks = trained(optimizer, each, mine, mine[:, :3])
total = []
for step in range(3 + 2 * hvd.rank()):
    total.append(float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)))
assert hvd.join() == hvd.size() - 1
assert total[3:] == [hvd.size() - 1 - step // 2 for step in range(2 * hvd.rank())], total
print(json.dumps({
    "places": places,
    "workers": json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"],
    "difference": max(float(np.abs(a - b).max()) for a, b in zip(alone, ranks)),
}))
"""

FAILS = """
import os, pathlib, signal, sys, time
from nanotf import hvd
hvd.init()
print("ready", flush=True)
if hvd.rank() == 1:
    print("last words", file=sys.stderr)
    os._exit(3)
signal.pause()
"""


def _environments(folder: pathlib.Path) -> list[dict[str, str]]:
    return [
        {"NANOTF_CURRENT_HOST": address, "NANOTF_WORKER_LOGS": str(folder / "logs")}
        for address in ADDRESSES
    ]


def _check_trained(run: HostsRun, places: Sequence[list[int]], workers: list[str]) -> None:
    found = json.loads(run.text(0).strip().splitlines()[-1])
    assert found["places"] == places
    assert found["workers"] == workers
    assert found["difference"] < 1e-10


def test_ranks_train_as_one_process(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(HostsRun(tmp_path, TRAINS, BY_FLAG, _environments(tmp_path))) as run:
        assert run.wait() == [0, 0], run.text(0) + run.text(1)
    workers = [f"{address}:8890" for address in ADDRESSES]
    _check_trained(run, [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]], workers)
    assert "lends 1 rank to 127.0.0.1" in run.text(1)
    assert "difference" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_host_that_cannot_take_part_ends_all(failing: int, tmp_path: pathlib.Path) -> None:
    counts = ["1", "1"]
    counts[failing] = "99999"
    hosts = ",".join(f"{name}:{count}" for name, count in zip(ADDRESSES, counts, strict=True))
    flags = ["--ranks", "--hosts", hosts]
    with contextlib.closing(HostsRun(tmp_path, "", flags, _environments(tmp_path))) as run:
        codes = run.wait()
    assert codes[failing] == 2 and codes[1 - failing] in (1, 2)
    said = f"Host {ADDRESSES[1]} cannot take part" if failing else "does not run the script"
    assert said in run.text(1 - failing)
    assert all("99999" in run.text(host) for host in (0, 1))


@pytest.mark.thorough
def test_slurm_gives_the_numbers_of_ranks(tmp_path: pathlib.Path) -> None:
    step = {
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_LOCALID": "0",
        "NANOTF_HOST_ADDRESSES": "node1=127.0.0.1,node2=127.0.0.2",
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "NANOTF_WORKER_LOGS": str(tmp_path / "logs"),
    }
    # A second task of the first node starts nothing, and stays until the end.
    environments = [
        {**step, "SLURM_NODEID": "0"},
        {**step, "SLURM_NODEID": "1"},
        {**step, "SLURM_NODEID": "0", "SLURM_LOCALID": "1"},
    ]
    source = TRAINS.replace("64, 8", "48, 8").replace("16", "12")
    with contextlib.closing(HostsRun(tmp_path, source, ["--ranks"], environments)) as run:
        assert run.wait() == [0, 0, 0], "".join(map(run.text, range(3)))
    places = [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]
    _check_trained(run, places, ["node1:8890", "node1:8891", "node2:8890"])


def test_a_failed_rank_ends_all_hosts_and_is_named(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(HostsRun(tmp_path, FAILS, BY_FLAG, _environments(tmp_path))) as run:
        assert run.wait() == [3, 3], run.text(0) + run.text(1)
    assert "nanotf: rank 1 (process " in run.text(0)
    assert "on host 127.0.0.2) exited with code 3" in run.text(0)
    assert run.text(0).rstrip().endswith("nanotf: last words")
    assert "on host 127.0.0.2) exited with code 3" in run.text(1)


def test_hosts_that_follow_end_with_0_if_asked(tmp_path: pathlib.Path) -> None:
    """The supervisor of a job asks for it: it names the host that has failed by itself."""
    environments = [{**each, "NANOTF_OWN_EXIT_CODE": "1"} for each in _environments(tmp_path)]
    with contextlib.closing(HostsRun(tmp_path, FAILS, BY_FLAG, environments)) as run:
        assert run.wait() == [0, 3], run.text(0) + run.text(1)


def test_a_job_names_the_host_whose_rank_has_failed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(FAILS)
    command = ["train", "--ranks", "-n", "1", "--instances", "2", "--name", "job", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "nanotf", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NANOTF_JOBS": str(tmp_path / "jobs")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    state = json.loads((tmp_path / "jobs" / "job" / "state.json").read_text())
    assert state["status"] == "Failed", done.stdout + done.stderr
    assert state["exit_codes"] == {"algo-1": 0, "algo-2": 3}
    assert "algo-2" in state["failure_reason"]


@pytest.mark.thorough
def test_a_lost_host_is_named(tmp_path: pathlib.Path) -> None:
    source = FAILS.replace("hvd.rank() == 1", "False")
    with contextlib.closing(HostsRun(tmp_path, source, BY_FLAG, _environments(tmp_path))) as run:
        run.has_reached("ready")
        run.hosts[1].send_signal(signal.SIGKILL)
        assert run.wait() == [1, -signal.SIGKILL], run.text(0)
    assert "nanotf: rank 1 was lost with host 127.0.0.2: " in run.text(0)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks_of_all_hosts(
    number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    source = FAILS.replace("hvd.rank() == 1", "False")
    with contextlib.closing(HostsRun(tmp_path, source, BY_FLAG, _environments(tmp_path))) as run:
        run.has_reached("ready")
        run.hosts[0].send_signal(number)
        assert run.wait() == [128 + number, 128 + number], run.text(0) + run.text(1)


def test_smp_on_several_hosts_is_refused(tmp_path: pathlib.Path) -> None:
    options = ["--smp", *BY_FLAG[1:]]
    with contextlib.closing(HostsRun(tmp_path, "", options, _environments(tmp_path))) as run:
        assert run.wait() == [2, 2]
    for host in range(2):
        assert "The ranks of nanotf.smp run on one host. Received: the hosts" in run.text(host)
