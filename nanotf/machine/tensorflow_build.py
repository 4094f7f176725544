"""The installed TensorFlow and its build, found without importing it here."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from nanotf.errors import describe_exit
from nanotf.machine.interpreter import python_command

SECONDS = 120.0  # TensorFlow's import takes 2 s, and minutes from a cold network file system

# Each of these packages provides the module `tensorflow`.
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "intel-tensorflow", "tensorflow-macos")


@dataclass(frozen=True)
class TensorFlowBuild:
    """An installed TensorFlow."""

    packages: tuple[str, ...] = ()  # the installed packages that provide it, with their versions
    tensorflow: str = ""  # its version; empty if it cannot be imported
    keras: str = ""  # the package that `tf.keras` comes from, and its version
    backend: str = ""  # Keras's
    onednn: bool = False  # whether its kernels use oneDNN in the present environment
    gpus: int = 0  # the number of GPUs that it sees
    error: str = ""  # why it cannot be imported; empty if it can


def installed_packages() -> tuple[str, ...]:
    """Returns the installed packages that provide the module `tensorflow`."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def read_build(environ: Mapping[str, str]) -> TensorFlowBuild:
    """Asks TensorFlow in a separate process. Takes some seconds.

    Args:
        environ: the environment of that process.
    """
    packages = installed_packages()
    try:
        asked = subprocess.run(
            python_command("nanotf.compat.build_facts"),
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return TensorFlowBuild(packages, error=f"did not end within {SECONDS:.0f} s")
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return TensorFlowBuild(packages, error=f"{describe_exit(asked.returncode)[0]}: {last}")
    return TensorFlowBuild(packages, **json.loads(lines[-1]))
