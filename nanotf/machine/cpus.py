"""The CPUs that this process may use: logical CPUs, affinity, cpuset, quota, NUMA nodes.

`Machine` is plain data, so that code that uses it can be tested for machines that we do not have.
`describe_machine` reads it from `/proc` and `/sys`, and never fails: unknown facts are left out
and listed in `Machine.notes`.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import psutil

from nanotf.machine.cgroups import parse_cpu_list, read_cpu_list, read_limits, read_text

# OpenMP runtimes that honor one of these bind the main thread to a single core.
_BINDING_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


@dataclass(frozen=True)
class LogicalCpu:
    """A logical CPU of the operating system: one hyper-thread of a physical core."""

    id: int  # the operating system's number
    core: int  # the physical core; hyper-thread siblings share it. Unique in its socket.
    socket: int = 0
    numa_node: int = 0
    online: bool = True
    efficiency: bool = False  # True for the slower cores of a hybrid processor


@dataclass(frozen=True)
class Machine:
    """A described machine."""

    cpus: tuple[LogicalCpu, ...]  # offline ones included
    affinity: frozenset[int] | None = None  # the process's affinity mask (`taskset`); None for all
    cpuset: frozenset[int] | None = None  # what its control groups allow; None for all
    quota: float | None = None  # CPUs that its control groups grant; None for no limit
    can_pin: bool = True  # whether processes can be pinned to cores here
    notes: tuple[str, ...] = ()  # the unknown facts, for `nanotf doctor`

    def physical_cores(self) -> tuple[LogicalCpu, ...]:
        """Returns the lowest logical CPU of each physical core that is online."""
        return _one_per_core(cpu for cpu in self.cpus if cpu.online)

    def allowed_cpus(self) -> tuple[LogicalCpu, ...]:
        """Returns the logical CPUs that are online, in the affinity mask and in the cpuset."""
        masks = [mask for mask in (self.affinity, self.cpuset) if mask is not None]
        return tuple(c for c in self.cpus if c.online and all(c.id in mask for mask in masks))

    def usable_cores(self, avoid: Collection[int] = ()) -> tuple[LogicalCpu, ...]:
        """Returns one logical CPU of each physical core that this process may actually use.

        Performance cores come first, then NUMA node by NUMA node. So the cores that a quota leaves
        are neighbors: it grants a number of cores, not particular ones.

        Args:
            avoid: logical CPUs of other owners. Their physical cores are left out, and use up
                their part of the quota.
        """
        cores = _one_per_core(self.allowed_cpus())
        limit = self.quota_cores()
        if avoid:
            taken = {_core_key(cpu) for cpu in self.cpus if cpu.id in avoid}
            free = tuple(core for core in cores if _core_key(core) not in taken)
            limit = None if limit is None else max(0, limit - (len(cores) - len(free)))
            cores = free
        return cores[:limit]

    def with_siblings(self, cores: Collection[int]) -> frozenset[int]:
        """Returns all logical CPUs that this process may use of the physical cores of some."""
        keys = {_core_key(cpu) for cpu in self.cpus if cpu.id in cores}
        return frozenset(cpu.id for cpu in self.allowed_cpus() if _core_key(cpu) in keys)

    def quota_cores(self) -> int | None:
        """Returns the whole cores that the quota grants, at least one; None for no limit.

        A quota of 3.5 CPUs gives three cores: a fourth worker would be paused half of the time,
        and the others would wait for it. Less than one CPU gives one core.
        """
        return None if self.quota is None else max(1, math.floor(self.quota))

    def is_quota_limited(self) -> bool:
        """Returns True if the quota, rather than a mask, limits the cores.

        Its cores are shared: every container of the host sees the same cores. If all pinned
        themselves, they would crowd on the first few.
        """
        limit = self.quota_cores()
        return limit is not None and limit < len(_one_per_core(self.allowed_cpus()))

    def explain(self) -> str:
        """Describes in one line the number of usable cores, and the limits that apply."""
        physical, allowed = len(self.physical_cores()), len(_one_per_core(self.allowed_cpus()))
        reasons = [f"{physical} physical {_cores(physical)} online"]
        if allowed < physical:
            kinds = []
            if _narrows(self.cpuset, self):
                kinds.append("the cgroup's cpuset")
            if _narrows(self.affinity, self):
                kinds.append("the affinity mask (taskset)")
            reasons.append(f"{allowed} of them in {' and '.join(kinds)}")
        if self.is_quota_limited():
            reasons.append(f"the cgroup's CPU quota is {self.quota:g} CPUs")
        usable = len(self.usable_cores())
        return f"{usable} usable {_cores(usable)}: {', '.join(reasons)}"


def _cores(number: int) -> str:
    return "core" if number == 1 else "cores"


def _narrows(mask: frozenset[int] | None, machine: Machine) -> bool:
    return mask is not None and any(c.online and c.id not in mask for c in machine.cpus)


def _core_key(cpu: LogicalCpu) -> tuple[int, int]:
    return cpu.socket, cpu.core


def _one_per_core(cpus: Iterable[LogicalCpu]) -> tuple[LogicalCpu, ...]:
    first: dict[tuple[int, int], LogicalCpu] = {}
    for cpu in sorted(cpus, key=lambda c: c.id):
        first.setdefault(_core_key(cpu), cpu)
    order = sorted(first.values(), key=lambda c: (c.efficiency, c.numa_node, c.socket, c.core))
    return tuple(order)


# ------------------------------------------------------------------- reading this machine
def describe_machine(
    root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None
) -> Machine:
    """Describes the machine as this process may use it.

    Reads `/proc/self/status`, `/proc/self/cgroup`, `/proc/self/mountinfo`, the control groups of
    v1 and v2, `/sys/devices/system/cpu` and `/sys/devices/system/node`.

    Args:
        root: the directory that holds `proc` and `sys`, default `/`; another one in tests.
        environ: only used to see if an OpenMP runtime binds threads; None for `os.environ`.

    Returns:
        If `/sys` is missing (macOS, some sandboxes), the cores are only counted, and `can_pin` is
        False if the processes cannot be pinned.
    """
    base = pathlib.Path(root)
    affinity = _affinity(base, os.environ if environ is None else environ)
    limits = read_limits(base)
    cpus = _read_cpus(base / "sys/devices/system")
    if cpus:
        can_pin = affinity is not None
        machine = Machine(cpus, affinity, limits.cpuset, limits.quota, can_pin)
        return machine if can_pin else _with_note(machine, "processes cannot be pinned here")
    if affinity:
        return Machine(
            tuple(LogicalCpu(cpu, cpu) for cpu in sorted(affinity)),
            affinity,
            limits.cpuset,
            limits.quota,
            notes=(
                "/sys/devices/system/cpu is missing: hyper-threads count as cores, and NUMA "
                "nodes are unknown",
            ),
        )
    count = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    machine = Machine(
        tuple(LogicalCpu(n, n) for n in range(count)), None, None, limits.quota, False
    )
    return _with_note(machine, "processes cannot be pinned here; the cores were only counted")


def _with_note(machine: Machine, note: str) -> Machine:
    return replace(machine, notes=(*machine.notes, note))


def _affinity(root: pathlib.Path, environ: Mapping[str, str]) -> frozenset[int] | None:
    masks = _status_mask(root / "proc/self/status")
    if any(environ.get(name) for name in _BINDING_VARIABLES):
        # libiomp5 binds the main thread to its first core at the first parallel region. Its other
        # threads hold the other cores; their union is the mask that the process started with.
        for status in (root / "proc/self/task").glob("*/status"):
            mask = _status_mask(status)
            masks = masks | mask if masks and mask else masks
    # The system call knows this machine alone, not that of another `root`.
    if masks is None and root == pathlib.Path("/") and hasattr(os, "sched_getaffinity"):
        masks = frozenset(os.sched_getaffinity(0))
    return masks


def _status_mask(path: pathlib.Path) -> frozenset[int] | None:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", read_text(path) or "", re.MULTILINE)
    try:
        return parse_cpu_list(found[1]) if found else None
    except ValueError:
        return None


def _read_cpus(system: pathlib.Path) -> tuple[LogicalCpu, ...]:
    """Reads the logical CPUs from `/sys/devices/system`. Returns () if it is missing."""
    directories = {
        int(path.name[3:]): path for path in (system / "cpu").glob("cpu[0-9]*") if path.is_dir()
    }
    online = read_cpu_list(system / "cpu/online")
    # Only Intel's hybrid processors have this file.
    slow = read_cpu_list(system.parent / "cpu_atom/cpus") or frozenset()
    nodes = _numa_nodes(system / "node")
    describe = functools.partial(_read_cpu, online=online, slow=slow, nodes=nodes)
    return tuple(describe(number, path) for number, path in sorted(directories.items()))


def _read_cpu(
    number: int,
    path: pathlib.Path,
    *,
    online: frozenset[int] | None,
    slow: frozenset[int],
    nodes: Mapping[int, int],
) -> LogicalCpu:
    topology = path / "topology"
    # The kernel's core_id is unique only within a die, the lowest sibling's number everywhere.
    siblings = read_cpu_list(topology / "core_cpus_list")  # Linux 5.3 on
    siblings = siblings or read_cpu_list(topology / "thread_siblings_list") or frozenset({number})
    try:
        # The kernel writes -1 where it does not know the socket.
        socket = max(0, int(read_text(topology / "physical_package_id") or 0))
    except ValueError:
        socket = 0
    # An offline CPU has no topology. It is still listed, so that messages can name it.
    is_online = number in online if online is not None else read_text(path / "online") != "0"
    return LogicalCpu(
        number, min(siblings), socket, nodes.get(number, 0), is_online, number in slow
    )


def _numa_nodes(directory: pathlib.Path) -> dict[int, int]:
    """Reads the NUMA node of each logical CPU."""
    return {
        cpu: int(path.name[4:])
        for path in directory.glob("node[0-9]*")
        for cpu in read_cpu_list(path / "cpulist") or ()
    }
