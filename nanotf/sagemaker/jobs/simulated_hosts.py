"""The cores of simulated hosts: each gets a part of those that this machine offers.

A host on a machine of its own sees that machine's cores. A simulated one is bound to its part by
the affinity mask, so `SM_NUM_CPUS`, `nanotf run -n` and TensorFlow find these cores and no others,
and hosts do not compete for them.

A CPU quota grants a number of cores, but not particular ones. There hosts are not bound (see
`Placement.pin`), and `SM_NUM_CPUS` is the number of cores in the part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from nanotf.machine import topology
from nanotf.machine.cpus import Machine


@dataclass(frozen=True)
class SimulatedHost:
    """The cores of a host."""

    cores: int  # the number of physical cores
    mask: frozenset[int] | None = None  # logical CPUs to bind its processes to; None for all


def divide(count: int, workers: int, machine: Machine) -> list[SimulatedHost]:
    """Divides a machine among hosts.

    Each host gets an equal share, on few NUMA nodes. If a share has fewer cores than a host has
    workers, hosts share cores: a slow simulation is better than none.

    Args:
        count: the number of hosts.
        workers: the workers that each host must be able to start; at most the usable cores.
        machine: the machine that they share.

    Returns:
        One entry for each host.
    """
    usable = [cpu.id for cpu in machine.usable_cores()]
    if count == 1 or not usable:
        return [SimulatedHost(max(1, len(usable)))] * count
    if count * workers > len(usable):
        # Each begins where the one before ends, so that all cores have about equally many workers.
        starts = [host * workers for host in range(count)]
        shares = [[usable[(at + n) % len(usable)] for n in range(workers)] for at in starts]
        can_bind = machine.can_pin and not machine.is_quota_limited()
    else:
        plan = topology.plan(count, machine=machine)
        if len(plan.placements[0].cores) < workers:  # NUMA nodes cost a share some cores
            plan = topology.plan(count, workers, machine)
        shares = [list(placement.cores) for placement in plan.placements]
        can_bind = plan.placements[0].pin
    return [
        SimulatedHost(len(each), machine.with_siblings(each) if can_bind else None)
        for each in shares
    ]


@contextlib.contextmanager
def bound(part: SimulatedHost) -> Iterator[None]:
    """Binds this thread, so processes that it starts are born bound to a part of the cores."""
    if part.mask is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, part.mask)
    try:
        yield
    finally:
        # The next host has other cores, and a supervisor packs archives on all of them.
        os.sched_setaffinity(0, before)
