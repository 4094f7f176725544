"""Described machines that the tests ask about."""

from __future__ import annotations

from nanotf.machine.cpus import LogicalCpu, Machine


def two_sockets() -> Machine:
    """2 sockets of 28 cores with hyper-threading: siblings are n and n + 56, as Linux numbers."""
    return Machine(
        tuple(
            LogicalCpu(n, core=n % 56, socket=n % 56 // 28, numa_node=n % 56 // 28)
            for n in range(112)
        )
    )


def flat(cores: int, **fields: object) -> Machine:
    return Machine(tuple(LogicalCpu(n, n) for n in range(cores)), **fields)  # type: ignore[arg-type]


def laptop() -> Machine:
    """6 performance cores with hyper-threads (0-11), 8 efficiency cores (12-19)."""
    fast = tuple(LogicalCpu(n, n // 2) for n in range(12))
    return Machine(fast + tuple(LogicalCpu(n, n, efficiency=True) for n in range(12, 20)))


def container() -> Machine:
    """Cores 4-11 of two sockets of 8, and a quota of 3.5 CPUs on top."""
    cpus = tuple(LogicalCpu(n, n, socket=n // 8, numa_node=n // 8) for n in range(16))
    return Machine(cpus, cpuset=frozenset(range(4, 12)), quota=3.5)
