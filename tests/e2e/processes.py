"""Scripts that run as a user would run them: in a process of their own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 250.0  # a cold start of TensorFlow in the script and in two workers, on a busy machine


def run_script(
    directory: pathlib.Path,
    source: str,
    *arguments: str,
    with_nanotf: bool = True,
    check: bool = True,
    seconds: float = SECONDS,
    directory_at_start: pathlib.Path | None = None,
    command: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Writes a script and runs it.

    Args:
        directory: where the script is put.
        source: its text.
        *arguments: of the command line.
        with_nanotf: whether nanotf can be imported in it.
        check: whether it has to end with exit code 0.
        seconds: how long it may take.
        directory_at_start: the working directory; default `directory`.
        command: words that go before Python's.
        **variables: environment variables.

    Returns:
        What it printed, and its exit code.
    """
    script = directory / "script.py"
    script.write_text(textwrap.dedent(source))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONPATH", None)
    if with_nanotf:
        environment["PYTHONPATH"] = str(ROOT)
    else:
        block = "import sys; sys.modules['nanotf'] = None\n"
        script.write_text(block + textwrap.dedent(source))
    done = subprocess.run(
        [*command, sys.executable, str(script), *arguments],
        cwd=directory_at_start or directory,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON document in the last line that a script printed."""
    return json.loads(done.stdout.strip().splitlines()[-1])
