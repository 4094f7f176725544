"""Numbers of processes tried by `num_processes="auto"`, on described machines."""

from __future__ import annotations

from typing import Any

import pytest
from machines import container, flat, laptop, two_sockets

from nanotf.errors import InvalidArgumentError, PlacementError
from nanotf.machine import topology
from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.parent.auto.candidates import numbers


def _plans(machine: Machine) -> dict[int, topology.Plan]:
    return {number: topology.plan(number, machine=machine) for number in numbers(machine=machine)}


def _cores(machine: Machine) -> dict[int, int]:
    """Returns the number of cores that each candidate uses."""
    return {number: len(plan.cores()) for number, plan in _plans(machine).items()}


MACHINES = {
    "two sockets": (two_sockets(), dict.fromkeys((1, 2, 4, 8, 14, 28, 56), 56)),
    "1": (flat(1), {1: 1}),
    "2": (flat(2), {1: 2, 2: 2}),
    "3": (flat(3), {1: 3, 2: 2, 3: 3}),
    "6": (flat(6), dict.fromkeys((1, 2, 3, 6), 6)),
    "7": (flat(7), {1: 7, 2: 6, 3: 6, 7: 7}),
    "12": (flat(12), dict.fromkeys((1, 2, 4, 6, 12), 12)),
    "48": (flat(48), dict.fromkeys((1, 2, 4, 8, 16, 24, 48), 48)),
    # Workers are not pinned, so no number stays on one node.
    "container": (container(), {1: 3, 2: 2, 3: 3}),
    # Only the largest number uses efficiency cores.
    "laptop": (laptop(), {1: 6, 2: 6, 3: 6, 6: 6, 14: 14}),
}


@pytest.mark.parametrize("name", MACHINES)
def test_all_cores_are_shared_out(name: str) -> None:
    machine, expected = MACHINES[name]
    assert _cores(machine) == expected


def test_no_worker_straddles_two_equal_nodes() -> None:
    for each in (6, 7, 9, 28):
        machine = Machine(tuple(LogicalCpu(n, n, numa_node=n // each) for n in range(2 * each)))
        first, *several = _plans(machine).values()
        assert first.cores() == tuple(range(2 * each))
        assert not any(plan.straddles() for plan in several)


def test_there_are_few_candidates() -> None:
    for cores in (*range(1, 18), 31, 32, 33, 64, 65, 129):
        found = numbers(machine=flat(cores))
        assert len(found) <= cores.bit_length() + 1
        assert found[0] == 1
        assert found[-1] == cores


def test_few_numbers_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = topology.plan

    def counted(number: int, *args: Any, **options: Any) -> topology.Plan:
        planned.append(number)
        return plan(number, *args, **options)

    monkeypatch.setattr(topology, "plan", counted)
    assert numbers(machine=flat(192)) == [1, 2, 4, 8, 16, 32, 64, 96, 192]
    assert len(planned) < 20


def test_cores_chosen_by_the_user() -> None:
    assert numbers(4, machine=two_sockets()) == [1, 2, 4, 8, 14]
    assert numbers(4, machine=flat(7)) == [1]
    assert numbers(cores=None, machine=flat(5)) == [1, 2, 5]
    assert numbers(None, range(10), two_sockets()) == [1, 2, 5, 10]
    with pytest.raises(InvalidArgumentError, match="cores_per_process=0"):
        numbers(0, machine=flat(4))
    with pytest.raises(PlacementError, match="of which \\[99\\] cannot be used"):
        numbers(cores=[0, 99])
