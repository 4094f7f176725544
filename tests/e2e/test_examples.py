"""The examples run unchanged, on data that need no network."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
from processes import SECONDS

pytestmark = pytest.mark.own_pool

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["custom_loop", "custom_loop_strategy", "fashion_mnist"])
def test_example(name: str, tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "digits"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.search(r": ([01]\.\d+)$", last)
    assert found is not None, last
    assert float(found[1]) > 0.7
    assert list(tmp_path.iterdir()) == []
