"""Descriptions of machines for tests."""

from __future__ import annotations

from nanotf.machine.cpus import LogicalCpu, Machine


def two_sockets() -> Machine:
    """Returns 2 sockets of 28 hyper-threaded cores; siblings are n and n + 56, as on Linux."""
    return Machine(
        tuple(
            LogicalCpu(n, core=n % 56, socket=n % 56 // 28, numa_node=n % 56 // 28)
            for n in range(112)
        )
    )


def flat(cores: int, **fields: object) -> Machine:
    return Machine(tuple(LogicalCpu(n, n) for n in range(cores)), **fields)  # type: ignore[arg-type]


def laptop() -> Machine:
    """Returns 6 performance cores with hyper-threads (0-11) and 8 efficiency cores (12-19)."""
    fast = tuple(LogicalCpu(n, n // 2) for n in range(12))
    return Machine(fast + tuple(LogicalCpu(n, n, efficiency=True) for n in range(12, 20)))


def container() -> Machine:
    """Returns cores 4-11 of two sockets of 8, with a quota of 3.5 CPUs."""
    cpus = tuple(LogicalCpu(n, n, socket=n // 8, numa_node=n // 8) for n in range(16))
    return Machine(cpus, cpuset=frozenset(range(4, 12)), quota=3.5)
