"""The binding of `mpirun`, by processes that start and bind others as it does."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from nanotf.errors import PlacementError
from nanotf.machine import launcher_binding
from nanotf.machine.launcher_binding import Binding

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system binds no processes"
)

# A launcher on all CPUs of the test, a process of it on one, and, below, a shell's child.
LAUNCHER = """
import os, subprocess, sys
cpus = sorted(os.sched_getaffinity(0))
bound = lambda: os.sched_setaffinity(0, cpus[:1])
environ = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}
command = [sys.executable, sys.argv[1]]
command = ["sh", "-c", " ".join(command) + "; true"] if "shell" in sys.argv else command
subprocess.run(command, env=environ, preexec_fn=bound, check=True)
"""
PROGRAM = """
import os
from nanotf.machine import launcher_binding
found = launcher_binding.undo(os.environ)
print(len(os.sched_getaffinity(0)), found is not None)
"""


@pytest.mark.parametrize("shell", ["", "shell"])
def test_a_binding_is_undone(shell: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "program.py"), shell]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("OMPI_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    count = len(os.sched_getaffinity(0))
    assert done.stdout.split() == [str(count), str(count > 1)]


def test_without_mpirun_an_affinity_is_the_users() -> None:
    assert launcher_binding.undo({"SLURM_LOCALID": "0"}) is None


def test_a_binding_that_stays_is_named() -> None:
    own = frozenset(os.sched_getaffinity(0))
    error = PlacementError("Every worker needs cores of its own.")
    for binding, text in (
        (Binding(own, None), r"of its own\. mpirun may have .* `mpirun --bind-to none`"),
        (None, r"of its own\.$"),
    ):
        with pytest.raises(PlacementError, match=text), launcher_binding.named(binding):
            raise error
