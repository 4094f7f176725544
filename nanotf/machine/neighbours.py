"""Other pools on this machine, and a plan beside them.

A worker that is pinned to cores has the name `PINNED`, so the process table says which are taken:
there is no file to lock, to protect or to leave behind, and a pool that was killed gives its cores
free at once. Pools that start in the same moment may miss each other.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import pathlib
from collections.abc import Sequence

from nanotf.console import logger
from nanotf.errors import InvalidArgumentTypeError, PlacementError
from nanotf.machine import topology
from nanotf.machine.cgroups import parse_cpu_list

PINNED = "nanotf-pinned"  # what `ps -o comm` and `top` show; 15 characters at most


@dataclasses.dataclass(frozen=True)
class _Request:
    """What was asked for, and the plan that it would get on an empty machine."""

    arguments: tuple[int, int | None, tuple[int, ...] | None]
    alone: topology.Plan


# The last plan. While nothing else is asked for, the pool keeps its cores, whoever comes and goes.
_last: tuple[_Request, topology.Plan] | None = None
_NAMED = 3  # processes that a warning lists

_warned = False  # whether this process has been told that its workers share cores


def taken_cores(proc: pathlib.Path = pathlib.Path("/proc")) -> dict[int, tuple[int, ...]]:
    """The logical CPUs that workers of other processes are pinned to, by that process's id.

    Args:
        proc: where the process table is; another one in tests.
    """
    found: dict[int, set[int]] = {}
    for process in proc.glob("[0-9]*"):
        try:
            if (process / "comm").read_text(errors="replace").strip() != PINNED:
                continue
            status = dict(
                line.split(":", 1)
                for line in (process / "status").read_text(errors="replace").splitlines()
            )
            cores = parse_cpu_list(status["Cpus_allowed_list"])
            # FD PARENT IMPORTS, of the zygote that it was forked from.
            owner = int((process / "cmdline").read_bytes().split(b"\0")[-3])
        except (OSError, LookupError, ValueError):  # it has ended, or only has that name
            continue
        if owner != os.getpid():
            found.setdefault(owner, set()).update(cores)
    return {owner: tuple(sorted(cores)) for owner, cores in found.items()}


def plan(
    num_processes: int,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
) -> topology.Plan:
    """A plan for this machine that leaves other pools' cores alone, where enough are left.

    Where they are not, the cores are shared, and a warning says so once. Cores that were named
    are taken as they are.

    Args:
        num_processes, cores_per_process, cores: as in `topology.plan`.

    Raises:
        PlacementError, InvalidArgumentError, InvalidArgumentTypeError: As `topology.plan`.
    """
    global _last
    if cores is not None:
        try:
            cores = [operator.index(core) for core in cores]
        except TypeError:
            raise InvalidArgumentTypeError(
                "`cores` must be a sequence of integers, the numbers of logical CPUs. "
                f"Received: cores={cores!r}. Pass such as cores=[0, 1, 2, 3]."
            ) from None
    alone = topology.plan(num_processes, cores_per_process, cores=cores)
    if cores is not None:
        return alone
    request = _Request((num_processes, cores_per_process, None), alone)
    if _last is not None and _last[0] == request:
        return _last[1]
    made = _beside(alone, num_processes, cores_per_process)
    _last = (request, made)
    return made


def forget() -> None:
    """The pool has ended: the next plan looks around again."""
    global _last
    _last = None


def _beside(
    alone: topology.Plan, num_processes: int, cores_per_process: int | None
) -> topology.Plan:
    global _warned
    taken = taken_cores()
    theirs = {core for cores in taken.values() for core in cores}
    if not theirs:
        return alone
    try:
        return topology.plan(num_processes, cores_per_process, avoid=theirs)
    except PlacementError:
        shared = sorted(theirs & set(alone.cores()))
        if shared and not _warned:
            _warned = True
            logger.warning(
                "The workers share the logical CPUs %s with those of %s: too few are left. All "
                "will be slow. Call nanotf.shutdown() there, or name cores=[...] here.",
                shared,
                _processes(sorted(taken)),
            )
        return alone


def _processes(pids: list[int]) -> str:
    named = ", ".join(map(str, pids[:_NAMED]))
    more = f" and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
    return f"process{'es' if len(pids) > 1 else ''} {named}{more}"
