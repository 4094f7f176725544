"""What a worker does before TensorFlow is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nanotf import worker


def test_cores_that_cannot_be_pinned_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: tuple[int, ...]) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    (warning,) = worker.pin((0, 1))
    assert "could not be pinned to cores [0, 1]" in warning
    assert "Operation not permitted" in warning


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_worker_whose_parent_has_gone_already() -> None:
    """It would wait for a signal that has been sent."""
    code = "from nanotf import worker; worker.end_with_parent(1); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
