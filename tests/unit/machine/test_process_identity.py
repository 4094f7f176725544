"""A process is told from a later one with its id by its start."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
from waiting import wait_until

from nanotf.machine import process_identity
from nanotf.machine.process_identity import start_of


@pytest.mark.parametrize("has_boot_id", [True, False])
def test_a_process_has_a_start_until_it_ends(
    has_boot_id: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system tells no id of its run, as in some sandboxes."""
    if not has_boot_id:
        monkeypatch.setattr(process_identity, "_BOOT_ID", "/nowhere/boot_id")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid = process.pid
        start = start_of(pid)
        assert start is not None and start == start_of(pid)
        assert start_of(os.getpid()) not in (None, start)
        process.kill()
        zombie = psutil.STATUS_ZOMBIE
        wait_until(lambda: psutil.Process(pid).status() == zombie, "its parent has not waited yet")
        assert start_of(pid) is None
    assert start_of(pid) is None
