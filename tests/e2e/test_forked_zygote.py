"""The zygote as a fork of the user's process: under `nanotf run`, and by `warm_up`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from processes import ROOT, SECONDS, last_json, run_script

pytestmark = pytest.mark.own_pool

PARTS = '''
import json, os, signal
import numpy as np
import psutil
import nanotf
from nanotf.pool import forks, warm

def is_fork_of(this):
    """Returns True if the zygote is a fork: it has this process's command line."""
    pid = forks.pid()
    return pid is not None and psutil.Process(pid).cmdline() == psutil.Process(this).cmdline()

def losses(**more):
    import tensorflow as tf
    tf.keras.utils.set_random_seed(7)
    tf.keras.backend.set_floatx("float64")
    layers = [tf.keras.Input((8,)), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1)]
    model = nanotf.keras.Sequential(layers)
    model.compile("adam", "mse")
    x = np.random.default_rng(0).random((64, 8))
    history = model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, **more)
    return history.history["loss"]

def are_equal(found, expected):
    return bool(np.allclose(found, expected, rtol=1e-10))
'''

UNDER_RUN = (
    PARTS
    + """
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # libraries of any value will do
found = {"before the script": is_fork_of(os.getpid())}
origin = forks.pid()
expected = losses(num_processes=1)
found["equal"] = are_equal(losses(num_processes=2), expected)
parents = {psutil.Process(pid).ppid() for pid in nanotf.worker_pids()}
found["forked from it"] = parents == {origin}
os.kill(origin, signal.SIGKILL)
psutil.Process(origin).wait()
found["equal after its end"] = are_equal(losses(num_processes=2), expected)
found["another one"] = forks.pid() not in (None, origin) and not is_fork_of(os.getpid())
print(json.dumps(found))
"""
)


def _run(folder: pathlib.Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "nanotf", "run", "-n", "2", "script.py"],
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_run_forks_it_before_the_script(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, UNDER_RUN)
    found = last_json(done)
    assert all(found.values()), (found, done.stderr)


LATER = (
    PARTS
    + """
origin = forks.pid()
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
found = {
    "there": origin is not None,
    "seen": nanotf.map(lambda name: os.environ[name], ["TF_ENABLE_ONEDNN_OPTS"], 1) == ["0"],
    "another one": forks.pid() not in (None, origin),
    "the first has ended": not psutil.pid_exists(origin),
}
nanotf.shutdown()
print(json.dumps(found))
"""
)


def test_variables_that_the_script_sets(tmp_path: pathlib.Path) -> None:
    """A library reads some when it is loaded: a fork has loaded it."""
    done = _run(tmp_path, LATER)
    found = last_json(done)
    assert all(found.values()), (found, done.stderr)


@pytest.mark.thorough
def test_each_worker_by_itself(tmp_path: pathlib.Path) -> None:
    script = "from nanotf.pool import forks; print('null' if forks.pid() is None else forks.pid())"
    assert last_json(_run(tmp_path, script, NANOTF_START="spawn")) is None


FIRST_LINE = (
    PARTS
    + """
import atexit, sys
import beside
beside.value = "changed"
answers = open("answers", "w")
answers.write("begun\\n")  # which no fork may write again
atexit.register(lambda: answers.write("ended\\n"))
signal.signal(signal.SIGUSR1, lambda number, frame: None)
nanotf.warm_up(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.stdin.read()  # until the test has seen the end of stdout

def state(_):
    import beside, signal, sys
    handler = signal.getsignal(signal.SIGUSR1)
    return beside.value, handler == signal.SIG_DFL, hasattr(sys.modules["__main__"], "answers")

found = {"by warm_up": is_fork_of(os.getpid())}
found["equal"] = are_equal(losses(num_processes=2), losses(num_processes=1))
found["state"] = nanotf.map(state, [0], 1) == [("stock", True, False)]
answers.write(json.dumps(found) + "\\n")
"""
)


def test_nothing_of_the_program_is_seen_in_the_fork(tmp_path: pathlib.Path) -> None:
    """Neither its open files, nor its handlers, modules and functions at the exit."""
    (tmp_path / "beside.py").write_text('value = "stock"\n')
    (tmp_path / "script.py").write_text(FIRST_LINE)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read() == b"", "the fork has closed it, too"
        process.stdin.close()
        assert process.wait(SECONDS) == 0
    begun, found, ended = (tmp_path / "answers").read_text().splitlines()
    assert (begun, ended) == ("begun", "ended")
    assert all(json.loads(found).values()), found


TOO_LATE = (
    PARTS
    + """
import sys, threading
import tensorflow as tf
if sys.argv[1] == "operation":
    tf.constant(1.0)
else:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
nanotf.warm_up(2)
found = are_equal(losses(num_processes=2), losses(num_processes=1))
print(json.dumps([found, is_fork_of(os.getpid())]))
"""
)


@pytest.mark.thorough
@pytest.mark.every_case
@pytest.mark.parametrize("what", ["operation", "thread"])
def test_a_program_that_has_begun(tmp_path: pathlib.Path, what: str) -> None:
    """A second process imports TensorFlow."""
    assert last_json(run_script(tmp_path, TOO_LATE, what)) == [True, False]
