"""Runs a measurement of `python -m benchmarks` in a process of its own.

It may pin itself, fork, or import TensorFlow, without effects on later measurements.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 900.0


def run(module: str, *arguments: object) -> Any:
    """Runs `python -m module arguments ...`, whose last line of output is JSON.

    Returns:
        The value of the last line.

    Raises:
        RuntimeError: The process failed, or took more than `SECONDS`.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{module} took more than {SECONDS:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{module} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])
