"""The numbers of processes that `num_processes="auto"` compares."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence

from nanotf.machine import shell_state, topology


def numbers(
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    machine: topology.Machine | None = None,
) -> list[int]:
    """Returns 1, about 2, 4, 8, ... and the largest number of processes.

    Among the numbers near a power of two it picks the one that divides the cores best: 14 instead
    of 16 on 56 cores, since 16 processes would use only 48. Other pools' cores count as free.

    Args:
        cores_per_process: None for equal shares of all usable cores.
        cores: the logical CPUs to divide; None for all that are usable.
        machine: None for this machine, with the shell's settings.

    Raises:
        PlacementError, InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
    """
    # The shell's limit is of this machine, not of one that is only described.
    cap = shell_state.cores_cap(os.environ) if machine is None else None
    machine = machine or topology.describe_machine()
    cores = topology.check_cores(cores)
    each = topology.check_cores_per_process(cores_per_process)
    count = len(machine.usable_cores()[:cap] if cores is None else cores)

    @functools.cache
    def plan(number: int) -> topology.Plan:
        # `cores_per_process` limits several processes; a single one may use all cores.
        share = each if number > 1 else None
        return topology.plan(number, share, machine, max_cores=cap, cores=cores)

    plan(1)  # raises if `cores` are wrong
    largest = max(1, count // (each or 1))
    slow = frozenset(cpu.id for cpu in machine.cpus if cpu.efficiency)
    chosen, power = {1, largest}, 2
    while power <= largest:
        # 2; 3-5; 6-10; 12-21: no number is near two powers.
        nearby = range(math.ceil(power * 3 / 4), min(power * 4 // 3, largest) + 1)
        chosen.add(_best_of(nearby, power, plan, slow, 0 if each else count))
        power *= 2
    return sorted(chosen)


def _best_of(
    nearby: Sequence[int],
    power: int,
    plan: Callable[[int], topology.Plan],
    slow: frozenset[int],
    count: int,
) -> int:
    """Returns the number that shares cores out best; plans few of them.

    Args:
        slow: logical CPUs of efficiency cores.
        count: the cores that the processes divide equally; 0 if they do not.
    """

    def least(number: int) -> tuple[bool, bool, int, int]:
        return False, False, -number * (count // number), abs(number - power)

    def cost(number: int) -> tuple[bool, bool, int, int]:
        found = plan(number)
        used = found.cores()
        # Every step waits for the slowest worker, so unequal workers cost more than idle cores.
        return (
            found.straddles(),
            not slow.isdisjoint(used),
            -len(used) if count else 0,
            abs(number - power),
        )

    costs: dict[int, tuple[bool, bool, int, int]] = {}
    for number in sorted(nearby, key=least):
        costs[number] = cost(number)
        if costs[number] == least(number):  # the following ones cannot cost less
            break
    return min(costs, key=lambda number: costs[number])
