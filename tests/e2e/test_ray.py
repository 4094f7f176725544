"""`backend="ray"`: the same workers, started by Ray on this machine.

Ray leaves threads and sockets in a process, so each test runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest
from parity import digits, small_cnn
from processes import ROOT, run_script
from waiting import wait_until

import nanotf
from nanotf.errors import UnsupportedVersionError
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
@pytest.mark.parametrize("module", ["ray_one_node", "ray_two_nodes"])
def test_group(
    module: str, tmp_path: pathlib.Path, own_ray: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Ray's workers behave like those of the local backend."""
    path = pathlib.Path(__file__).with_name(f"{module}.py")
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-x", "--tb=short"]
    command += ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
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
import psutil, tensorflow as tf
import nanotf
from nanotf.keras import Sequential
sys.path.insert(0, sys.argv[1])
from parity import digits, small_cnn

x, y = digits(100)
ON_RAY = dict(verbose=0, num_processes=2, backend="ray")
"""

SHUTS_DOWN = """
import ray
nanotf.warm_up(2, backend="ray")
small_cnn().fit(x, y, **ON_RAY)
# Ray outlives the thread that started it, and can start more workers.
small_cnn().fit(x, y, transport="grpc", **ON_RAY)
children = psutil.Process().children(recursive=True)
pids = nanotf.worker_pids()
nanotf.shutdown()
_, alive = psutil.wait_procs(children, timeout=60)
told = {"pids": pids, "children": len(children), "alive": [str(process) for process in alive],
        "initialized": ray.is_initialized()}
ray.init("local", include_dashboard=False, log_to_driver=False)
nanotf.shutdown()
print(json.dumps({**told, "users": ray.is_initialized()}))
"""

IS_KILLED = """
def tell(epoch, logs):
    if epoch == 1:
        workers = [psutil.Process(pid) for pid in nanotf.worker_pids()]
        print(json.dumps({
            "ours": [p.pid for w in workers for p in (w, *w.parents()[:2])],
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
        done = run_script(directory, TRAINS + body, str(ROOT / "tests" / "e2e"), check=check)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    assert lines, done.stderr
    return lines


def test_ray_that_nanotf_starts_ends_with_shutdown(
    tmp_path: pathlib.Path, own_ray: dict[str, str]
) -> None:
    told = json.loads(_script(tmp_path, own_ray, SHUTS_DOWN)[-1])
    assert len(told["pids"]) == 2
    assert told["children"] > 2
    assert told["alive"] == []
    assert told["initialized"] is False
    assert told["users"] is True, "the user's Ray stays"


@pytest.mark.thorough
def test_parent_that_is_killed(tmp_path: pathlib.Path, own_ray: dict[str, str]) -> None:
    """Workers and actors end. Two of Ray's own processes (2.60) remain, as without nanotf."""
    told = json.loads(_script(tmp_path, own_ray, IS_KILLED, check=False)[-1])
    assert len(set(told["ours"])) == 4
    try:
        wait_until(lambda: not any(map(_runs, told["ours"])), "workers and actors end", 60)
    finally:
        for pid in filter(_runs, told["all"]):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
