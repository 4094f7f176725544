"""The programs of docs/how-to/trackers.md with the trackers' packages, which no extra installs."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from documents import DOCS, python_blocks

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
PROGRAMS = {name: code for name, code in python_blocks(DOCS / "how-to/trackers.md") if name}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.timeout(600)
def test_tracker(name: str, tmp_path: pathlib.Path) -> None:
    for package in ("mlflow", "wandb"):
        if f"import {package}\n" in PROGRAMS[name]:
            pytest.importorskip(package, reason="run `make test-libraries`")
    (tmp_path / name).write_text(PROGRAMS[name])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]
