"""Runs scripts as a user would: in a separate process."""

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
SHARING = pathlib.Path(__file__).with_name("ranks_that_share_cores.py")
SECONDS = 500.0  # a cold start of TensorFlow in the script and in two workers, on a busy machine


def run_script(
    directory: pathlib.Path,
    source: str,
    *arguments: str,
    with_nanotf: bool = True,
    check: bool = True,
    directory_at_start: pathlib.Path | None = None,
    command: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Writes a script and runs it.

    Args:
        directory: folder for the script.
        source: its text.
        *arguments: of the command line.
        with_nanotf: whether nanotf can be imported in it.
        check: whether it must end with exit code 0.
        directory_at_start: the working directory; default `directory`.
        command: words before Python's.
        **variables: environment variables.

    Returns:
        Its output and its exit code.
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
        timeout=SECONDS,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def run_python(directory: pathlib.Path, *command: str | pathlib.Path, **variables: str) -> str:
    """Runs Python with nanotf in a folder. Returns its output; fails if Python fails.

    Args:
        directory: the working directory.
        *command: the words after Python's.
        **variables: environment variables.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_ranks(
    program: pathlib.Path, *arguments: str, ranks: int = 2, flag: str = "--smp"
) -> subprocess.CompletedProcess[str]:
    """Runs a program in ranks, by `nanotf run`; fails if it fails.

    Args:
        program: path of the program.
        *arguments: its own.
        ranks: how many.
        flag: `--smp` or `--ranks`.

    Returns:
        Its output.
    """
    has_cores = len(os.sched_getaffinity(0)) >= ranks
    command = ["-m", "nanotf"] if has_cores else [str(SHARING)]
    done = subprocess.run(
        [sys.executable, *command, "run", flag, "-n", str(ranks), program, *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    """Returns the JSON document in the last line of a script's output."""
    return json.loads(done.stdout.strip().splitlines()[-1])
