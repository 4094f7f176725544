"""`nanotf run` on several hosts: processes of this machine at 127.0.0.1 and 127.0.0.2."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import signal
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hosts_run import ADDRESSES, HostsRun

pytestmark = pytest.mark.own_pool

LOST_SECONDS = 30.0  # the promise: a lost host ends the job within that time

SCRIPT = """
import json, sys, time
import numpy as np
import tensorflow as tf

tf.keras.backend.set_floatx("float64")
tf.keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(203, 8)), rng.integers(0, 3, 203)
model = tf.keras.Sequential([
    tf.keras.layers.Input((8,)),
    tf.keras.layers.Dense(16, activation="relu"),
    tf.keras.layers.Dropout(0.2),
    tf.keras.layers.BatchNormalization(),
    tf.keras.layers.Dense(3, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


class Note(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        time.sleep(float(PAUSE))


options = json.loads(OPTIONS)
fitted = model.fit(x, y, 32, EPOCHS, 0, [Note()], shuffle=False, **options)
again = model.fit(x, y, 50, 1, verbose=0, shuffle=False)  # on the warm pool
print(json.dumps({
    "loss": fitted.history["loss"] + again.history["loss"],
    "evaluate": model.evaluate(x, y, verbose=0, return_dict=True)["loss"],
    "weights": float(sum(np.abs(w).sum() for w in model.get_weights())),
    **EXTRA(),
}))
"""

WITH_WORKERS = """
def EXTRA():
    import nanotf
    found = nanotf.cluster()
    report = again.nanotf
    predicted = model.predict(x, verbose=0, num_processes=SIZE)
    return {
        "predicts": bool(np.allclose(predicted, model.predict(x, verbose=0), rtol=1e-9)),
        "hosts": list(found.hosts), "rank": found.rank, "source": found.source,
        "workers": len(nanotf.worker_pids()),
    }
"""


def _source(
    epochs: int = 2, pause: float = 0.0, extra: str = "EXTRA = dict", **options: Any
) -> str:
    head = f"PAUSE, EPOCHS, OPTIONS = {pause}, {epochs}, {json.dumps(json.dumps(options))}"
    return "\n".join([head, textwrap.dedent(extra), textwrap.dedent(SCRIPT)])


@pytest.fixture
def plain(float64: None) -> dict[str, Any]:
    """The numbers of one process, this one: it has imported TensorFlow already.

    The script's `set_floatx` changes no layer after another test has set a policy for them.
    """
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(_source(), {})
    found: dict[str, Any] = json.loads(output.getvalue().splitlines()[-1])
    return found


@pytest.fixture
def runs() -> Iterator[list[HostsRun]]:
    started: list[HostsRun] = []
    yield started
    for run in started:
        run.close()


def _by_flag(workers: int) -> tuple[list[str], list[dict[str, str]]]:
    flag = ",".join(f"{address}:{workers}" for address in ADDRESSES)
    return ["--hosts", flag], [{"NANOTF_CURRENT_HOST": address} for address in ADDRESSES]


def _by_sagemaker(folder: pathlib.Path) -> tuple[list[str], list[dict[str, str]]]:
    environments = []
    for current in ("algo-1", "algo-2"):
        config = folder / current / "input" / "config"
        config.mkdir(parents=True)
        text = json.dumps({"current_host": current, "hosts": ["algo-1", "algo-2"]})
        (config / "resourceconfig.json").write_text(text)
        environments.append(
            {
                "SAGEMAKER_BASE_DIR": str(folder / current),
                "SM_NETWORK_INTERFACE_NAME": "nanotf-none0",
                "NANOTF_HOST_ADDRESSES": "algo-1=127.0.0.1,algo-2=127.0.0.2",
            }
        )
    return ["-n", "1"], environments


def _by_slurm(folder: pathlib.Path) -> tuple[list[str], list[dict[str, str]]]:
    step = {
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_LOCALID": "0",
        "NANOTF_HOST_ADDRESSES": "node1=127.0.0.1,node2=127.0.0.2",
        "SAGEMAKER_BASE_DIR": str(folder),
    }
    # A second task of the second node lends nothing, and stays until the end.
    return [], [
        {**step, "SLURM_NODEID": "0"},
        {**step, "SLURM_NODEID": "1"},
        {**step, "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
    ]


def _check_equal(text: str, plain: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-10)
    assert found["evaluate"] == pytest.approx(plain["evaluate"], rel=1e-10)
    assert found["weights"] == pytest.approx(plain["weights"], rel=1e-10)
    return found


def test_one_worker_each_with_sagemakers_files(
    runs: list[HostsRun], tmp_path: pathlib.Path, plain: dict[str, Any]
) -> None:
    source = _source(extra=WITH_WORKERS.replace("SIZE", "2"))
    run = HostsRun(tmp_path, source, *_by_sagemaker(tmp_path))
    runs.append(run)
    run.has_reached("epoch 0")
    assert _listening_on([host.pid for host in run.hosts]) == sorted(ADDRESSES)
    codes = run.wait()
    assert codes == [0, 0], run.text(0) + run.text(1)
    found = _check_equal(run.text(0), plain)
    assert found["predicts"]
    assert (found["hosts"], found["rank"], found["workers"]) == (["algo-1", "algo-2"], 0, 2)
    assert found["source"].endswith("resourceconfig.json")
    # Other lines may come first: the agent waits if it starts before the first host.
    lends = "nanotf: host algo-2 lends 1 worker to algo-1 until its script ends."
    assert lends in run.text(1).splitlines()


@pytest.mark.thorough
def test_two_workers_each_with_slurms_variables(
    runs: list[HostsRun], tmp_path: pathlib.Path, plain: dict[str, Any]
) -> None:
    source = _source(extra=WITH_WORKERS.replace("SIZE", "4"))
    run = HostsRun(tmp_path, source, *_by_slurm(tmp_path))
    runs.append(run)
    codes = run.wait()
    assert codes == [0, 0, 0], "".join(map(run.text, range(3)))
    found = _check_equal(run.text(0), plain)
    assert found["predicts"]
    assert (found["source"], found["workers"]) == ("Slurm", 4)
    assert "lends" not in run.text(2)


@pytest.mark.thorough
def test_killed_agent_restarts_with_the_hosts_that_are_left(
    runs: list[HostsRun], tmp_path: pathlib.Path, plain: dict[str, Any]
) -> None:
    run = HostsRun(tmp_path, _source(pause=2.0, max_restarts=1), *_by_flag(1))
    runs.append(run)
    run.has_reached("epoch 0")
    run.hosts[1].send_signal(signal.SIGKILL)
    assert run.wait() == [0, -signal.SIGKILL], run.text(0)
    _check_equal(run.text(0), plain)
    assert "was lost with host 127.0.0.2: " in run.text(0)
    assert "restart 1 of 1" in run.text(0)


@pytest.mark.thorough
def test_killed_agent_ends_the_job_with_its_name(
    runs: list[HostsRun], tmp_path: pathlib.Path
) -> None:
    run = HostsRun(tmp_path, _source(epochs=100, pause=0.5), *_by_flag(1))
    runs.append(run)
    run.has_reached("epoch 0")
    run.hosts[1].send_signal(signal.SIGKILL)
    assert run.hosts[0].wait(LOST_SECONDS) == 1
    assert "WorkerDied: Worker 1" in run.text(0)
    assert "was lost with host 127.0.0.2" in run.text(0)


@pytest.mark.thorough
def test_script_that_fails_ends_the_agents_with_its_code(
    runs: list[HostsRun], tmp_path: pathlib.Path
) -> None:
    run = HostsRun(tmp_path, "import sys\nsys.exit(5)\n", *_by_flag(1))
    runs.append(run)
    assert run.wait() == [5, 5], run.text(0) + run.text(1)


def _listening_on(pids: Sequence[int]) -> list[str]:
    """Returns the addresses on which processes and their descendants listen."""
    import psutil

    found = []
    for pid in pids:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            found += [
                connection.laddr.ip
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    return sorted(found)
