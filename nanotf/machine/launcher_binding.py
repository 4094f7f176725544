"""The cores to which `mpirun` has bound this process, undone for nanotf's own placement.

Open MPI binds each process to one core unless it is told otherwise. nanotf's workers on a host
belong to one of these processes, and are placed on all cores that the launcher itself may use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from nanotf.errors import PlacementError
from nanotf.machine.cluster import MPIRUN


@dataclass(frozen=True)
class Binding:
    """The logical CPUs of a process that a launcher has started."""

    own: frozenset[int]
    launchers: frozenset[int] | None  # of the launcher's own process; None if it cannot be read

    @property
    def is_narrow(self) -> bool:
        """True if the launcher may use more than it has given to this process."""
        return self.launchers is not None and self.own < self.launchers


def read(environ: Mapping[str, str]) -> Binding | None:
    """Returns the binding of this process; None if `mpirun` has not started it.

    The launcher is the nearest process above this one without the variables that it sets.
    """
    marks = [name for name in MPIRUN if name in environ]
    if not marks or not hasattr(os, "sched_getaffinity"):
        return None
    own, launchers = frozenset(os.sched_getaffinity(0)), None
    with contextlib.suppress(psutil.Error, OSError):
        above = psutil.Process().parents()
        launcher = next((each for each in above if marks[0] not in each.environ()), None)
        launchers = None if launcher is None else frozenset(launcher.cpu_affinity())
    return Binding(own, launchers)


def undo(environ: Mapping[str, str]) -> Binding | None:
    """Lets this process run on all cores of the launcher that has bound it to some of them.

    Returns:
        The binding as it was; None if there was none, or it is known to be no narrower.
    """
    found = read(environ)
    if found is None or (found.launchers is not None and not found.is_narrow):
        return None
    if found.launchers is not None:
        # The kernel leaves out what the cpuset forbids, and refuses if nothing remains.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, found.launchers)
    return found


@contextlib.contextmanager
def named(binding: Binding | None) -> Iterator[None]:
    """Adds the launcher to an error of a placement that a binding may have made too small."""
    try:
        yield
    except PlacementError as error:
        if binding is None or frozenset(os.sched_getaffinity(0)) != binding.own:
            raise
        raise PlacementError(
            f"{error} mpirun may have bound this process to these cores: start it as "
            "`mpirun --bind-to none` (Intel MPI: with I_MPI_PIN=0)."
        ) from error
