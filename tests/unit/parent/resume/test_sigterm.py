"""SIGTERM ends a process that `fit` holds back for a moment, as it would have ended it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

ENDS = """
import os, signal
from nanotf.parent.resume.sigterm import Sigterm
with Sigterm():
    input()
    print("last words")
    os.kill(os.getpid(), signal.SIGTERM)
print("still alive")
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_sigterm_ends_the_process_whoever_reads_its_output(is_read: bool) -> None:
    """`tee` in a pipeline gets the signal, too, and may be gone first."""
    reader, writer = os.pipe()
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        [sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=writer, env=buffered
    ) as process:
        os.close(writer)
        if not is_read:
            os.close(reader)
        process.communicate(b"\n", timeout=250)
    assert process.returncode == -signal.SIGTERM
    if is_read:
        with os.fdopen(reader) as output:
            assert output.read() == "last words\n"
