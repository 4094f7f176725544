"""Threads that a fork does not have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys, threading
from nanotf.machine import forking
if len(sys.argv) > 1:
    end = threading.Event()
    threading.Thread(target=end.wait).start()
child = forking.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print(forking.has_kept_threads())
if len(sys.argv) > 1:
    end.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists threads")
@pytest.mark.parametrize("thread", [(), ("thread",)])
def test_threads_that_stay(thread: tuple[str, ...]) -> None:
    command = [sys.executable, "-W", "error", "-c", CODE, *thread]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(bool(thread))]
