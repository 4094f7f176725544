"""`nanotf doctor` on this machine, with TensorFlow and real workers."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf
from processes import ROOT, SECONDS

import nanotf
from nanotf.compat.versions import keras_module_name
from nanotf.machine.tensorflow_build import read_build

pytestmark = pytest.mark.own_pool
KERAS = keras_module_name()


def _run(
    *arguments: str, cores: int | None = None, place: pathlib.Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs `nanotf doctor` on some of the cores, with the nanotf of a directory."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    code = f"import os, runpy; os.sched_setaffinity(0, {allowed}); "
    code += "runpy.run_module('nanotf', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(place)},
        cwd=place,  # `python -c` imports from there first
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _doctor(*arguments: str, cores: int | None = None) -> tuple[int, Any]:
    """Runs `nanotf doctor --json` on some of the cores; returns its exit code and report."""
    done = _run("--json", *arguments, cores=cores)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_two_workers_pass_the_test() -> None:
    code, told = _doctor("--test")
    assert [(check["name"], check["passed"]) for check in told["test"]] == [
        ("training", True),
        ("all-reduce", True),
    ], told["test"]
    assert code == 0
    assert told["tensorflow"]["tensorflow"] == tf.__version__
    assert told["tensorflow"]["keras"].split()[0] == KERAS
    assert not [finding for finding in told["findings"] if finding["severity"] == "error"]
    # What `nanotf doctor` compares between environments follows the environment.
    other = read_build({**os.environ, "TF_NUM_INTRAOP_THREADS": "99", "TF_ENABLE_ONEDNN_OPTS": "0"})
    assert other.threads > told["tensorflow"]["threads"] > 1
    # A build with OpenMP always uses oneDNN.
    assert other.onednn == told["tensorflow"]["openmp"]
    assert pathlib.Path(other.allocator).is_file()
    assert other.packages == tuple(told["tensorflow"]["packages"])
    assert other.packages[0].endswith(f" {tf.__version__}")


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
def test_one_core_skips_the_test_with_a_reason() -> None:
    code, told = _doctor("--test", cores=1)
    assert code == 1
    assert len(told["workers"]) == 1
    assert told["machine"]["affinity"] == [min(os.sched_getaffinity(0))]
    assert told["test"] == []
    (error,) = (finding for finding in told["findings"] if finding["severity"] == "error")
    assert "Two workers need two cores" in error["text"]


@pytest.mark.thorough
def test_the_block_for_an_issue_names_versions_and_hides_private_things(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "nanotf").symlink_to(ROOT / "nanotf")
    monkeypatch.setenv("HOME", str(tmp_path))  # Keras and matplotlib write files there
    monkeypatch.setenv("TF_VAR_password", "a secret")
    monkeypatch.setenv("TF_CONFIG", "a host")
    done = _run(place=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    before, block, after = done.stdout.split("```")
    assert (before.startswith("To report a problem"), after) == (True, "\n")
    for text in (
        f"nanotf      {nanotf.__version__} (~/nanotf)",
        tf.__version__,
        platform.release(),
        "  TF_CONFIG ",
    ):
        assert text in block
    for hidden in (str(tmp_path), "a secret", "a host"):
        assert hidden not in block
