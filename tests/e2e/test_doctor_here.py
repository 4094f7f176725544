"""`nanotf doctor` on this machine, with TensorFlow and real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf
from processes import ROOT, SECONDS

from nanotf.compat.versions import keras_module_name

pytestmark = pytest.mark.own_pool
KERAS = keras_module_name()


def _doctor(*arguments: str, cores: int | None = None) -> tuple[int, Any]:
    """Runs `nanotf doctor --json` on some of the cores; returns its exit code and report."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    code = f"import os, runpy; os.sched_setaffinity(0, {allowed}); "
    code += "runpy.run_module('nanotf', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
def test_one_core_skips_the_test_and_says_why() -> None:
    code, told = _doctor("--test", cores=1)
    assert code == 1
    assert len(told["workers"]) == 1
    assert told["test"] == []
    (error,) = (finding for finding in told["findings"] if finding["severity"] == "error")
    assert "Two workers need two cores" in error["text"]
