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


@dataclass(frozen=True)
class TensorFlowBuild:
    """An installed TensorFlow."""

    packages: tuple[str, ...] = ()  # the installed packages that provide it, with their versions
    tensorflow: str = ""  # its version; empty if it cannot be imported
    keras: str = ""  # the package that `tf.keras` comes from, and its version
    backend: str = ""  # Keras's
    onednn: bool = False  # whether its kernels use oneDNN in the environment that was asked about
    threads: int = 0  # of a process that has run an operation on the CPU there
    bound_threads: int = 0  # those of them that may use only some of the process's logical CPUs
    allocator: str = ""  # the library whose `malloc` that process calls; empty if unknown
    gpus: int = 0  # the number of GPUs that it sees
    float32: float = 0.0  # seconds of a convolution there; 0 if unknown
    bfloat16: float = 0.0  # seconds of the same in bfloat16
    error: str = ""  # why it or its Keras cannot be imported; empty if they can


def installed_packages() -> tuple[str, ...]:
    """Returns the installed packages that provide the module `tensorflow`."""
    names = importlib.metadata.packages_distributions().get("tensorflow", ())
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def installed_plugins() -> tuple[str, ...]:
    """Returns the installed packages that TensorFlow loads as its plug-ins, with their versions."""
    names = importlib.metadata.packages_distributions().get("tensorflow-plugins", ())
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


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
