"""Places for reader processes, beside those of workers.

Rules:

1. Readers get cores that no worker uses, one each, if every worker then still has its cores: those
   that the user names, `cores_per_process` each, or at least one. The workers share the rest.
2. Efficiency cores first, then cores of the NUMA node that has most left, so that the workers'
   shares stay equal.
3. If there are not enough cores, readers are not pinned: the kernel moves them where time is left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.machine.topology import Placement


@dataclass(frozen=True)
class ReaderPlan:
    """The places of all readers."""

    placements: tuple[Placement, ...]  # one core each
    own: bool  # whether these cores are theirs alone

    def cores(self) -> tuple[int, ...]:
        """Returns the logical CPUs that workers must leave free."""
        return tuple(p.cores[0] for p in self.placements) if self.own else ()


def plan_readers(
    number: int,
    machine: Machine,
    *,
    workers: int = 1,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    max_cores: int | None = None,
    avoid: Collection[int] = (),
) -> ReaderPlan:
    """Gives each reader a place. See the top of this module for the rules.

    Args:
        number: above 0.
        workers: 1 if this process trains.
        cores_per_process: cores of each worker; None for equal shares.
        cores: the logical CPUs that the user names for workers; None if they are not named.
        max_cores: the most cores to use in all; None for no cap.
        avoid: logical CPUs of other pools.
    """
    # If other pools have all cores, the readers share them.
    usable = machine.usable_cores(avoid)[:max_cores] or machine.usable_cores()
    pin = machine.can_pin and not machine.is_quota_limited()
    if cores is not None:
        free = machine.usable_cores((*avoid, *cores))[:max_cores]
        spare = len(free)
    else:
        free, spare = usable, len(usable) - workers * (cores_per_process or 1)
    if number <= spare:
        chosen = _spread(free, number)
        places = (Placement(n, (c.id,), c.numa_node if pin else None, pin) for n, c in chosen)
        return ReaderPlan(tuple(places), own=True)
    shared = (Placement(n, (usable[n % len(usable)].id,), None, False) for n in range(number))
    return ReaderPlan(tuple(shared), own=False)


def _spread(cores: Sequence[LogicalCpu], number: int) -> list[tuple[int, LogicalCpu]]:
    """Chooses cores by rule 2; returns them with the readers' numbers."""
    left = list(cores)
    chosen = []
    for _ in range(number):
        slow = [core for core in left if core.efficiency]
        counts = {core.numa_node: 0 for core in left}
        for core in left:
            counts[core.numa_node] += 1
        most = max(counts, key=lambda node: (counts[node], node))
        core = slow[-1] if slow else [c for c in left if c.numa_node == most][-1]
        left.remove(core)
        chosen.append(core)
    return list(enumerate(sorted(chosen, key=lambda c: (c.numa_node, c.id))))
