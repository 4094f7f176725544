"""Other pools on this machine, and plans that avoid their cores.

A worker that is pinned to cores has the process name `PINNED`, so the process table shows which
cores are taken. There is no file to lock, protect or leave behind, and a killed pool frees its
cores at once. Pools that start at the same moment may miss each other.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import psutil

from nanotf.console import warn_once
from nanotf.errors import PlacementError
from nanotf.machine import reader_places, shell_state, topology
from nanotf.machine.cgroups import parse_cpu_list
from nanotf.machine.cpus import describe_machine
from nanotf.machine.reader_places import ReaderPlan

# Names in `ps -o comm` and `top`, of 15 characters at most.
PINNED = "nanotf-pinned"  # a worker, or a process of `nanotf run --smp`
WORKER = "nanotf-worker"  # one that is not pinned, or not yet
ZYGOTE = "nanotf-zygote"  # workers are forked from it


@dataclasses.dataclass(frozen=True)
class _Request:
    """A request for cores, and the plan that it would get on an empty machine."""

    arguments: tuple[int, int | None, tuple[int, ...]]
    alone: topology.Plan


# The last plan. Until the request changes, the pool keeps its cores, whatever other pools do.
_last: collections.deque[tuple[_Request, topology.Plan]] = collections.deque(maxlen=1)
_NAMED = 3  # processes that a warning lists


def taken_cores(proc: pathlib.Path = pathlib.Path("/proc")) -> dict[int, tuple[int, ...]]:
    """Finds the logical CPUs to which other processes' workers are pinned, by owner's process id.

    Args:
        proc: the directory of the process table; another one in tests.
    """
    found: dict[int, set[int]] = {}
    for process in proc.glob("[0-9]*"):
        try:
            if (process / "comm").read_text(errors="replace").strip() != PINNED:
                continue
            cores = parse_cpu_list(_status(process)["Cpus_allowed_list"])
            owner = _owner(process)
        except (OSError, LookupError, ValueError):  # it has exited
            continue
        if owner != os.getpid():
            found.setdefault(owner, set()).update(cores)
    return {owner: tuple(sorted(cores)) for owner, cores in found.items()}


def _status(process: pathlib.Path) -> dict[str, str]:
    lines = (process / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _owner(process: pathlib.Path) -> int:
    """Returns the process whose workers these are: the first above them that is nanotf's no more.

    A fork, as of a zygote, has the command line of another process: the names tell.
    """
    while (parent := int(_status(process)["PPid"])) != os.getpid():
        process = process.parent / str(parent)
        if _status(process)["Name"] not in (PINNED, WORKER, ZYGOTE):
            break
    return parent


def plan(
    num_processes: int,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    avoid: Collection[int] = (),
    part: float = 1.0,
) -> topology.Plan:
    """Plans workers for this machine. Avoids other pools' cores if enough are left.

    If too few are left, pools share cores, and one warning is logged. Cores that the user names are
    used as they are.

    Args:
        num_processes, cores_per_process, cores: as in `topology.plan`.
        avoid: the logical CPUs of this process's readers.
        part: the part of the usable cores that all workers get, as equal shares.

    Raises:
        PlacementError, InvalidArgumentError, InvalidArgumentTypeError: As `topology.plan`.
    """
    if cores_per_process is None and part < 1.0:
        cores_per_process = max(1, int(topology.usable_count() * part / num_processes))
    cores = topology.check_cores(cores)
    alone = topology.plan(num_processes, cores_per_process, cores=cores, avoid=avoid)
    if cores is not None:
        return alone
    request = _Request((num_processes, cores_per_process, tuple(avoid)), alone)
    if _last and _last[0][0] == request:
        return _last[0][1]
    made = _beside(alone, num_processes, cores_per_process, avoid)
    _last.append((request, made))
    return made


def plan_readers(
    number: int,
    workers: int,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
) -> ReaderPlan:
    """Plans reader processes for this machine. Avoids other pools' cores if enough are left.

    Args:
        workers, cores_per_process, cores: as in `reader_places.plan_readers`.
    """
    machine, cap = describe_machine(), shell_state.cores_cap(os.environ)
    theirs = {core for found in taken_cores().values() for core in found}
    rest: Any = {
        "workers": workers,
        "cores_per_process": cores_per_process,
        "cores": cores,
        "max_cores": cap,
    }
    beside = reader_places.plan_readers(number, machine, avoid=theirs, **rest)
    return beside if beside.own else reader_places.plan_readers(number, machine, **rest)


def forget() -> None:
    """Forgets the last plan when its pool has ended, so that the next one looks for other pools."""
    _last.clear()


def _beside(
    alone: topology.Plan,
    num_processes: int,
    cores_per_process: int | None,
    avoid: Collection[int],
) -> topology.Plan:
    taken = taken_cores()
    theirs = {core for cores in taken.values() for core in cores}
    if not theirs:
        return alone
    try:
        return topology.plan(num_processes, cores_per_process, avoid={*theirs, *avoid})
    except PlacementError:
        shared = sorted(theirs & set(alone.cores()))
        if shared:
            warn_once(
                "The workers share the logical CPUs %s with those of %s: too few are left. All "
                "will be slow. Let those end first, or use fewer workers.",
                shared,
                _processes(sorted(taken)),
            )
        return alone


def _processes(pids: list[int]) -> str:
    named = ", ".join(map(program, pids[:_NAMED]))
    more = f" and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
    return f"{named}{more}"


def program(pid: int) -> str:
    """Names a process for people: the program and its script, without options, maybe secret."""
    try:
        file, *arguments = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):  # it has ended
        return f"process {pid}"
    script = [] if not arguments or arguments[0].startswith("-") else arguments[:1]
    names = " ".join(pathlib.Path(each).name for each in (file, *script))
    return f"{names} (process {pid})"
