"""Plans: the cores of each worker on a machine.

`plan` is a pure function of a described machine (see `cpus.Machine`): the same machine and the
same arguments give the same plan, on this machine and in a test of one that we do not have.

Rules for sharing cores out:

1. Only cores that this process may really use count: online, in the affinity mask and in the
   cgroup's cpuset, no more than the CPU quota grants, one logical CPU per physical core.
2. All workers get the same number. Training is in lockstep: each step waits for the slowest
   worker, so a worker with one core more would only wait longer. Cores that are left over stay
   free for the parent, which feeds the workers.
3. A worker's cores are on one NUMA node if that costs at most `MAX_SHARE_LOSS` of the
   share. Otherwise as few workers as possible straddle nodes.
4. Workers are spread over the nodes as evenly as they fit, for the nodes' memory bandwidth.
   Ranks are numbered node by node, so that neighbors share a node.
5. Efficiency cores of a hybrid processor are used only if the performance cores do not suffice.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanotf.errors import InvalidArgumentTypeError, PlacementError, check_integer
from nanotf.machine import shell_state
from nanotf.machine.cpus import LogicalCpu, Machine, describe_machine

__all__ = [
    "MAX_SHARE_LOSS",
    "LogicalCpu",
    "Machine",
    "Placement",
    "Plan",
    "check_num_processes",
    "describe_machine",
    "plan",
]

# The part of a worker's share that may be lost to keep each worker on one NUMA node. A guess, not
# a measurement: reading the other node's memory costs a straddling worker about that much.
MAX_SHARE_LOSS = 0.10

CORES_PER_PROCESS = 4  # where nobody has named a number of processes
AUTO = "auto"  # each `fit` measures its own number of processes, see `parent.auto.choice`


@dataclass(frozen=True)
class Placement:
    """The cores of one worker.

    Args:
        rank: int, 0..N-1.
        cores: tuple of int, logical CPUs, one per physical core, in ascending order.
        numa_node: int or None (default), the node that all of them are on; None for several, or if
            the worker is not pinned.
        pin: bool, default True; False if the worker must not be pinned: the machine cannot, or
            a CPU quota grants a number of cores but not these.
    """

    rank: int
    cores: tuple[int, ...]
    numa_node: int | None = None
    pin: bool = True


@dataclass(frozen=True)
class Plan:
    """The cores of all workers. Equal plans give the same pool.

    Args:
        placements: tuple of `Placement`, in the order of ranks.
    """

    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        """Returns the number of workers."""
        return len(self.placements)

    def cores(self) -> tuple[int, ...]:
        """Returns the logical CPUs of all workers."""
        return tuple(core for placement in self.placements for core in placement.cores)

    def like_nodes(self) -> int:
        """Returns the number of NUMA nodes if each has equally many workers, in order; else 1."""
        nodes = [placement.numa_node for placement in self.placements]
        found = list(dict.fromkeys(nodes))
        each = len(nodes) // len(found)
        alike = nodes == [node for node in found for _ in range(each)]
        return len(found) if alike and None not in found else 1

    def straddles(self) -> bool:
        """Returns True if a worker has cores of several NUMA nodes, or may run on any."""
        return any(placement.numa_node is None for placement in self.placements)


def check_num_processes(value: Any) -> int:
    """Checks the argument `num_processes`.

    Args:
        value: the user's argument.

    Raises:
        InvalidArgumentTypeError: It is not an integer (bool and float are not).
        InvalidArgumentError: It is below 1.
    """
    return check_integer(
        "num_processes",
        value,
        "Pass the number of workers to start",
        more=f" Only fit() and nanotf.map() take num_processes={AUTO!r}.",
    )


def check_cores_per_process(value: Any) -> int | None:
    """Checks the argument `cores_per_process`; None stays None.

    Raises:
        InvalidArgumentTypeError, InvalidArgumentError: As `check_num_processes`.
    """
    if value is None:
        return None
    return check_integer("cores_per_process", value, "Pass the cores of each worker")


def check_cores(value: Any) -> list[int] | None:
    """Checks the argument `cores`; None stays None.

    Raises:
        InvalidArgumentTypeError: It is no sequence of integers.
    """
    if value is None:
        return None
    try:
        return [operator.index(core) for core in value]
    except TypeError:
        raise InvalidArgumentTypeError(
            "`cores` must be a sequence of integers, the numbers of logical CPUs. "
            f"Received: cores={value!r}. Pass a list such as cores=[0, 1, 2, 3]."
        ) from None


def default_count() -> int:
    """Returns the number of processes for this machine where nobody has named one."""
    return max(1, usable_count() // CORES_PER_PROCESS)


def usable_count() -> int:
    """Returns the number of cores of this machine that workers may use; see `plan`."""
    return len(describe_machine().usable_cores()[: shell_state.cores_cap(os.environ)])


def plan(
    num_processes: int,
    cores_per_process: int | None = None,
    machine: Machine | None = None,
    *,
    max_cores: int | None = None,
    cores: Sequence[int] | None = None,
    avoid: Collection[int] = (),
) -> Plan:
    """Gives each worker its own cores. See the top of this module for the rules.

    Args:
        num_processes: int, the number of workers.
        cores_per_process: int or None, cores of each worker; None for equal shares of all,
            rounded down.
        machine: `Machine` to plan for, default None: this machine, as `describe_machine` finds it.
        max_cores: int or None, the most cores to use in all. None means no cap for a described
            machine; for this machine the cap is the user's `OMP_NUM_THREADS`, or the number given
            to `nanotf-init --cores`.
        cores: sequence of int or None, the logical CPUs to share out, instead of those that the
            quota, `max_cores` and "one per physical core" leave. They must be online and allowed.
        avoid: collection of int, logical CPUs that another pool owns; their hyper-thread siblings
            are avoided, too.

    Returns:
        `Plan`.

    Raises:
        InvalidArgumentTypeError, InvalidArgumentError: An argument is not a positive integer.
        PlacementError: There are not enough cores, or `cores` are not usable.

    Example:
        >>> two_by_four = Machine(tuple(LogicalCpu(n, n, numa_node=n // 4) for n in range(8)))
        >>> [placement.cores for placement in plan(2, machine=two_by_four).placements]
        [(0, 1, 2, 3), (4, 5, 6, 7)]
    """
    num_processes = check_num_processes(num_processes)
    cores_per_process = check_cores_per_process(cores_per_process)
    if machine is None:
        machine = describe_machine()
        max_cores = shell_state.cores_cap(os.environ) if max_cores is None else max_cores
    if max_cores is not None:
        max_cores = check_integer("max_cores", max_cores, "Pass the cores of all workers")
    # Under a quota all containers see the same cores: only those that the user names are pinned.
    pin = machine.can_pin and (cores is not None or not machine.is_quota_limited())
    if cores is not None:
        pool, why = _named_cores(machine, cores, avoid), f"{len(cores)} cores were named"
    else:
        free = machine.usable_cores(avoid)
        pool = free[:max_cores]
        why = _why(machine, max_cores if len(pool) < len(free) else None, avoid)
    pool, share = _share(pool, num_processes, cores_per_process, why)
    return Plan(tuple(_place(pool, num_processes, share, pin)))


def _named_cores(
    machine: Machine, cores: Sequence[int], avoid: Collection[int]
) -> tuple[LogicalCpu, ...]:
    allowed = {cpu.id: cpu for cpu in machine.allowed_cpus()}
    wrong = [cpu for cpu in cores if cpu not in allowed or cpu in avoid]
    if wrong or len(set(cores)) != len(cores) or not cores:
        free = sorted(set(allowed) - set(avoid))
        raise PlacementError(
            "`cores` must name logical CPUs that are online, allowed for this process, not taken "
            f"by another pool, and each only once. Received: cores={list(cores)!r}"
            f"{f', of which {wrong} cannot be used' if wrong else ''}. Choose from {free}."
        )
    return tuple(sorted((allowed[cpu] for cpu in cores), key=lambda c: (c.numa_node, c.id)))


def _why(machine: Machine, cap: int | None, avoid: Collection[int]) -> str:
    parts = [f"This machine has {machine.explain()}"]
    if avoid:
        parts.append(f"another pool has the logical CPUs {sorted(avoid)}")
    if cap is not None:
        parts.append(f"no more than {cap} may be used (OMP_NUM_THREADS or nanotf-init --cores)")
    return "; ".join(parts)


def _share(
    cores: tuple[LogicalCpu, ...], num_processes: int, wanted: int | None, why: str
) -> tuple[tuple[LogicalCpu, ...], int]:
    """Returns the cores to share out, and the number that each worker gets."""
    need = num_processes * (wanted or 1)
    if need > len(cores):
        asked = f"num_processes={num_processes}"
        remedy = f"Pass num_processes={max(1, len(cores))} or less"
        if wanted is not None:
            asked += f", cores_per_process={wanted}"
            fits = len(cores) // num_processes
            remedy = f"Pass cores_per_process={fits} or less" if fits else remedy
            remedy += ", or leave cores_per_process out" if fits else ""
        raise PlacementError(
            f"Every worker needs cores of its own: {need} in all, but {len(cores)} can be used. "
            f"Received: {asked}. {why}. {remedy}."
        )
    # One efficiency core slows its worker down, and every step waits for that worker.
    fast = tuple(core for core in cores if not core.efficiency)
    cores = fast if need <= len(fast) else cores
    if wanted is not None:
        return cores, wanted
    share = len(cores) // num_processes
    sizes = [len(group) for group in _by_node(cores).values()]
    # The largest share with which no worker straddles nodes; see rule 3.
    whole = next(s for s in range(share, -1, -1) if s == 0 or _fit(sizes, s) >= num_processes)
    return cores, whole if whole >= (1 - MAX_SHARE_LOSS) * share else share


def _fit(sizes: Iterable[int], share: int) -> int:
    """Counts the workers of `share` cores that fit without straddling nodes of these sizes."""
    return sum(size // share for size in sizes)


def _by_node(cores: Iterable[LogicalCpu]) -> dict[int, list[LogicalCpu]]:
    nodes: dict[int, list[LogicalCpu]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(core)
    return dict(sorted(nodes.items()))


def _place(
    cores: tuple[LogicalCpu, ...], num_processes: int, share: int, pin: bool
) -> Iterable[Placement]:
    nodes = _by_node(cores)
    # Each worker goes to the node with the most cores left; the lowest node if several are equal.
    counts = dict.fromkeys(nodes, 0)
    for _ in range(num_processes):
        node = max(nodes, key=lambda n: (len(nodes[n]) - counts[n] * share, -n))
        if len(nodes[node]) - counts[node] * share < share:
            break
        counts[node] += 1
    groups = []
    for node, count in counts.items():
        groups += [nodes[node][n * share : (n + 1) * share] for n in range(count)]
    # The others straddle: each takes the largest remainders first, so it is on the fewest nodes.
    rest = {node: nodes[node][count * share :] for node, count in counts.items()}
    while len(groups) < num_processes:
        group: list[LogicalCpu] = []
        while len(group) < share:
            node = max(rest, key=lambda n: (len(rest[n]), -n))
            take = share - len(group)
            group += rest[node][:take]
            rest[node] = rest[node][take:]
        groups.append(group)
    for rank, group in enumerate(groups):
        on = {core.numa_node for core in group}
        # A worker that is not pinned runs on any node, and must not ask for this one's memory.
        node_of_all = on.pop() if pin and len(on) == 1 else None
        yield Placement(rank, tuple(sorted(core.id for core in group)), node_of_all, pin)
