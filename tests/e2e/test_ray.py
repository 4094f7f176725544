"""`backend="ray"`: workers on CPUs of Ray's, on one node of this machine or on two. Ray Serve.

Ray leaves threads and sockets in a process, so each test runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest
from parity import digits, small_cnn
from processes import ROOT, run_python, run_script
from waiting import wait_until

import nanotf
from nanotf.errors import InvalidArgumentError, UnsupportedVersionError
from nanotf.pool import backends

pytestmark = pytest.mark.own_pool

GROUP_SECONDS = 840.0  # for a module of tests


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """Returns variables that make a process start its own Ray, whatever runs on this machine."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'nanotf[ray]'")
    # A short name: Ray makes Unix sockets below it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as here:
        yield {
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": here,
            # Ray kills actors when the machine's memory is nearly full, whichever process uses it.
            "RAY_memory_monitor_refresh_ms": "0",
        }


@pytest.mark.timeout(GROUP_SECONDS + 60)
def test_two_nodes(
    tmp_path: pathlib.Path, own_ray: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Workers on two nodes behave like those of the local backend."""
    path = pathlib.Path(__file__).with_name("ray_two_nodes.py")
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-x", "--tb=short"]
    command += ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "--durations=10"]
    if (number := request.config.getoption("--cases")) is not None:
        command += ["--cases", str(number)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **own_ray, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=GROUP_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


TRAINS = """
import json, os, signal, sys
sys.path[:0] = sys.argv[1:]
import psutil, tensorflow as tf
import nanotf
from nanotf.keras import Sequential
from parity import digits, small_cnn
from waiting import wait_until

x, y = digits(100)
ON_RAY = dict(verbose=0, num_processes=2, backend="ray")
"""

ONE_NODE = """
import ray, threading
nanotf.warm_up(2, backend="ray")
fitted = small_cnn().fit(x, y, **ON_RAY)
held = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)
names = [thread.name for thread in threading.enumerate()]
children = psutil.Process().children(recursive=True)
pids = nanotf.worker_pids()
nanotf.shutdown()
_, alive = psutil.wait_procs(children, timeout=60)
told = {"loss": fitted.history["loss"], "held": held, "listens": "nanotf-gate" in names,
        "pids": pids, "children": len(children), "alive": [str(process) for process in alive],
        "initialized": ray.is_initialized()}

many = os.cpu_count() + 2
ray.init("local", num_cpus=many, include_dashboard=False, log_to_driver=False)
errors = []
for more in ({"num_processes": many + 1}, {"cores_per_process": many}, {"num_processes": many}):
    try:
        small_cnn().fit(x, y, **{**ON_RAY, **more})
    except nanotf.errors.PlacementError as error:
        errors.append(str(error))
wait_until(lambda: ray.available_resources().get("CPU") == many, "a call that fails holds no CPUs")
again = small_cnn().fit(x, y, transport="grpc", **ON_RAY)
free = ray.available_resources().get("CPU", 0)
nanotf.shutdown()
wait_until(lambda: ray.available_resources().get("CPU") == many, "Ray has its CPUs back")
print(json.dumps({**told, "many": many, "errors": errors, "again": again.history["loss"],
                  "free": free, "users": ray.is_initialized()}))
"""

IS_KILLED = """
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)

def tell(epoch, logs):
    if epoch == 1:
        here, there = map(psutil.Process, nanotf.worker_pids())
        ours = [here, here.parent(), there, *there.parents()[:2]]
        print(json.dumps({
            "ours": [p.pid for p in ours],
            "all": [p.pid for p in psutil.Process().children(recursive=True)],
        }), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

small_cnn().fit(x, y, epochs=100000, callbacks=[
    tf.keras.callbacks.LambdaCallback(on_epoch_begin=tell)], **ON_RAY)
"""


def _script(
    directory: pathlib.Path, own_ray: dict[str, str], body: str, check: bool = True
) -> list[str]:
    """Returns the output of a script that makes nanotf start a Ray."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own_ray.items():
            patch.setenv(name, value)
        folders = (str(ROOT / "tests" / "e2e"), str(ROOT / "tests"))  # of `parity`, `waiting`
        done = run_script(directory, TRAINS + body, *folders, check=check)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    assert lines, done.stderr
    return lines


def test_one_node(tmp_path: pathlib.Path, own_ray: dict[str, str]) -> None:
    """Ray only holds the CPUs. A Ray that nanotf starts ends with `shutdown`; the user's stays."""
    told = json.loads(_script(tmp_path, own_ray, ONE_NODE)[-1])
    assert len(told["loss"]) == len(told["again"]) == 1
    assert told["held"] >= 2
    assert told["listens"] is False
    assert len(told["pids"]) == 2
    assert told["children"] > 2
    assert told["alive"] == []
    assert told["initialized"] is False
    many = told["many"]
    more, wider, cores = told["errors"]
    assert f"num_processes={many + 1}, {many} CPUs on this process's node, and [] on" in more
    assert f"num_processes=2, cores_per_process={many}, {many} CPUs" in wider
    assert f"num_processes={many}" in cores, "Ray has more CPUs than this machine has cores"
    assert told["free"] == many % 2
    assert told["users"] is True, "the user's Ray stays"


@pytest.mark.thorough
def test_parent_that_is_killed(tmp_path: pathlib.Path, own_ray: dict[str, str]) -> None:
    """Workers and actors end. Processes of Ray's own remain, as without nanotf."""
    told = json.loads(_script(tmp_path, own_ray, IS_KILLED, check=False)[-1])
    assert len(set(told["ours"])) == 5
    try:
        wait_until(lambda: not any(map(_runs, told["ours"])), "workers and actors end", 60)
    finally:
        for pid in filter(_runs, told["all"]):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("own_ray")
def test_arguments_that_ray_cannot_take() -> None:
    x, y = digits(20)
    with pytest.raises(InvalidArgumentError, match=r"Received: cores=\[0, 1\]"):
        small_cnn().fit(x, y, num_processes=2, cores=[0, 1], backend="ray")
    with pytest.raises(InvalidArgumentError, match="measures on the cores of this machine"):
        small_cnn().fit(x, y, num_processes="auto", backend="ray")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _asked_on_ray(
    directory: pathlib.Path, own_ray: dict[str, str], program: str, *options: str
) -> str:
    """Returns the output of a program that uses Ray Serve at a port that is free."""
    command = [sys.executable, "-c", "from ray import serve"]
    if subprocess.run(command, capture_output=True, check=False, timeout=GROUP_SECONDS).returncode:
        pytest.skip("Ray Serve is not installed: pip install 'ray[serve]'")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    folders = os.pathsep.join(str(ROOT / name) for name in ("", "examples", "tests"))
    words = [program, *options, "--port", str(port)]
    return run_python(directory, *words, **{**own_ray, "PYTHONPATH": folders})


@pytest.mark.thorough
def test_ray_serve_example(tmp_path: pathlib.Path, own_ray: dict[str, str]) -> None:
    """Replicas answer as `predict` does."""
    program = str(ROOT / "examples" / "ray_serve.py")
    output = _asked_on_ray(tmp_path, own_ray, program, "--replicas", "1")
    difference = re.search(r"largest difference from predict: (\S+)$", output, re.MULTILINE)
    assert difference is not None, output
    assert float(difference[1]) <= 1e-5


def test_ray_serve_replicas(tmp_path: pathlib.Path, own_ray: dict[str, str]) -> None:
    """Each answers as the model, from its own CPU, in batches where rows are apart.

    A bad request fails no other.
    """
    output = _asked_on_ray(tmp_path, own_ray, str(ROOT / "tests" / "e2e" / "ray_replicas.py"))
    found = json.loads(output.splitlines()[-1])
    for name, batches in (("apart", True), ("centred", False)):
        *statuses, of_bad = found[name]["statuses"]
        assert set(statuses) == {200}
        assert of_bad == 400
        assert "must have the shape (None, 3)" in found[name]["error"]
        assert found[name]["difference"] <= 1e-5
        assert found[name]["batches"] is batches
    (cpu,) = found["apart"]["cores"]
    assert cpu, "a whole CPU is claimed"
    assert found["centred"]["cores"] == [""], "a part of a CPU is not"
    assert found["again"] == cpu, "the next replica gets the CPU of one that was killed"
    assert found["wrong"] == [400] * 3


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    x, y = digits(20)
    model = small_cnn()
    for call in (model.fit, model.evaluate):
        with pytest.raises(UnsupportedVersionError, match=r"pip install 'nanotf\[ray\]'"):
            call(x, y, num_processes=2, backend="ray")
    with pytest.raises(ImportError, match="is not installed in this Python"):
        nanotf.warm_up(2, backend="ray")
    assert nanotf.worker_pids() == ()


def test_the_local_backend_by_its_other_name() -> None:
    assert "multiprocessing" in backends.BACKENDS
    assert backends.check_backend(None) == "local"
    assert backends.check_backend("multiprocessing") == "local"
    assert backends.plan("multiprocessing", 1) == backends.plan(None, 1)
