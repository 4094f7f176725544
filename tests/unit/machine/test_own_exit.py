"""Functions that a process calls at its end, and not at that of its fork."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from nanotf.machine.own_exit import at_own_exit
at_own_exit(lambda: print("ended", os.getpid() == owner, flush=True))
owner = os.getpid()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print("the child has ended", flush=True)
"""


def test_a_fork_that_ends_does_not_end_its_parent() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["the child has ended", "ended True"]
