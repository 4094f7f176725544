"""A job outlives a full disk: on a small one that fills and empties, at every phase."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from processes import ROOT, SECONDS

pytestmark = pytest.mark.own_pool

_ALONE = ("unshare", "--map-root-user", "--mount")


def test_a_job_outlives_a_full_disk(tmp_path: pathlib.Path) -> None:
    tried = (*_ALONE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("this kernel lets nobody mount a tmpfs in a namespace of their own")
    done = subprocess.run(
        [*_ALONE, sys.executable, str(ROOT / "tests/e2e/full_disk.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout.split() == ["start", "log", "log_by_script", "upload", "end"], done.stderr
