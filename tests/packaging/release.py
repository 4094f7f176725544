"""Builds and installs the archives of a release, for the tests beside this file."""

from __future__ import annotations

import os
import pathlib
import subprocess
import venv
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Distributions(NamedTuple):
    """The archives that `python -m build` makes."""

    sources: pathlib.Path
    wheel: pathlib.Path


class Installation(NamedTuple):
    """A virtual environment, and the variables of a shell that has activated it."""

    python: pathlib.Path
    environment: dict[str, str]


def run(*command: object, seconds: int = 240, **more: object) -> str:
    """Returns what a command prints. Fails if the command does."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **more,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*paths: str) -> list[str]:
    """Returns the files below the paths that git tracks or would add, in alphabetical order."""
    listed = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z", "--", *paths)
    return sorted(name for name in filter(None, listed.split("\0")) if (ROOT / name).is_file())


def copy(names: list[str], target: pathlib.Path) -> None:
    """Copies files of this clone, which builds would otherwise write to."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((ROOT / name).read_bytes())
        (target / name).chmod((ROOT / name).stat().st_mode)


def build_environment(**more: str) -> dict[str, str]:
    """Returns variables for a build, which make pip patient."""
    patient = {"PIP_RETRIES": "10", "PIP_DEFAULT_TIMEOUT": "60"}
    return {**os.environ, **patient, **more}


def install(archive: pathlib.Path, directory: pathlib.Path, seconds: int = 240) -> Installation:
    """Installs an archive and its requirements in a new environment, with no compiler on PATH."""
    venv.create(directory, with_pip=True)
    bin_folder = directory / "bin"
    foreign = ("PYTHONPATH", "VIRTUAL_ENV", "CXX")
    kept = {name: value for name, value in build_environment().items() if name not in foreign}
    run(
        *(bin_folder / "python", "-m", "pip", "install", "--quiet", archive),
        seconds=seconds,
        env={**kept, "PATH": str(bin_folder)},
    )
    path = f"{bin_folder}{os.pathsep}{kept['PATH']}"
    return Installation(bin_folder / "python", {**kept, "PATH": path})
