"""The numbers of processes that `num_processes="auto"` compares, and their cores."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence

from nanotf.errors import PlacementError
from nanotf.machine import neighbours, shell_state, topology


def candidates(
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    machine: topology.Machine | None = None,
) -> dict[int, topology.Plan]:
    """Returns 1, about 2, 4, 8, ... and the largest number of processes, with their cores.

    Among the numbers near a power of two it picks the one that divides the cores best: 14 instead
    of 16 on 56 cores, since 16 processes would use only 48.

    Args:
        cores_per_process: None for equal shares of all usable cores.
        cores: the logical CPUs to divide; None for all that are usable.
        machine: None for this machine; its other pools and the shell's settings count then.

    Raises:
        PlacementError, InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
    """
    if machine is None:
        # Raises if `cores` are wrong: below, a `PlacementError` only ends the search for numbers.
        neighbours.plan(1, None, cores)
        described, cap = topology.describe_machine(), shell_state.cores_cap(os.environ)
    else:
        described, cap = machine, None
    found: dict[int, topology.Plan] = {}
    for number in itertools.count(1):
        try:
            # `cores_per_process` limits several processes; a single one may use all cores.
            each = cores_per_process if number > 1 else None
            found[number] = topology.plan(number, each, described, max_cores=cap, cores=cores)
        except PlacementError:
            break
    slow = frozenset(cpu.id for cpu in described.cpus if cpu.efficiency)
    chosen = _well_shared(found, slow, equal_shares=cores_per_process is None)
    if machine is not None:
        return {number: found[number] for number in chosen}
    return {n: neighbours.plan(n, cores_per_process if n > 1 else None, cores) for n in chosen}


def _well_shared(
    plans: Mapping[int, topology.Plan], slow: frozenset[int], equal_shares: bool
) -> list[int]:
    """Returns the best number near each power of two, and the largest number.

    Args:
        plans: by number of processes: 1, 2, 3, ... without a gap.
        slow: logical CPUs of efficiency cores.
        equal_shares: whether the processes divide all cores equally.
    """

    def cost(number: int, power: int) -> tuple[bool, bool, int, int]:
        plan = plans[number]
        used = plan.cores()
        # Every step waits for the slowest worker, so unequal workers cost more than idle cores.
        return (
            plan.straddles(),
            not slow.isdisjoint(used),
            -len(used) if equal_shares else 0,
            abs(number - power),
        )

    chosen, power = {1, len(plans)} if plans else set(), 2
    while power <= len(plans):
        # 2; 3-5; 6-10; 12-21: no number is near two powers.
        nearby = range(math.ceil(power * 3 / 4), min(power * 4 // 3, len(plans)) + 1)
        chosen.add(min(nearby, key=lambda number: cost(number, power)))
        power *= 2
    return sorted(chosen)
