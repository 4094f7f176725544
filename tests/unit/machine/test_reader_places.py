"""Reader processes get places beside the workers."""

from __future__ import annotations

import pytest

from nanotf.machine import topology
from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.machine.reader_places import plan_readers

EIGHT = Machine(tuple(LogicalCpu(n, n) for n in range(8)))
TWO_BY_FOUR = Machine(tuple(LogicalCpu(n, n, numa_node=n // 4) for n in range(8)))


def test_workers_share_the_cores_that_readers_leave() -> None:
    readers = plan_readers(2, EIGHT, workers=3)
    workers = topology.plan(3, machine=EIGHT, avoid=readers.cores())
    assert readers.own
    assert all(placement.pin for placement in readers.placements)
    assert [p.cores for p in workers.placements] == [(0, 1), (2, 3), (4, 5)]
    assert readers.cores() == (6, 7)


def test_each_node_gives_a_core() -> None:
    readers = plan_readers(2, TWO_BY_FOUR, workers=2)
    workers = topology.plan(2, machine=TWO_BY_FOUR, avoid=readers.cores())
    assert readers.cores() == (3, 7)
    assert [p.cores for p in workers.placements] == [(0, 1, 2), (4, 5, 6)]


def test_efficiency_cores_come_first() -> None:
    hybrid = Machine(tuple(LogicalCpu(n, n, efficiency=n >= 6) for n in range(8)))
    assert plan_readers(2, hybrid, workers=2).cores() == (6, 7)
    assert set(plan_readers(3, hybrid, workers=2).cores()) == {5, 6, 7}


def test_cores_that_the_user_names_stay_the_workers() -> None:
    assert plan_readers(3, EIGHT, workers=2, cores=[0, 1, 2, 7]).cores() == (4, 5, 6)
    assert plan_readers(2, EIGHT, workers=2, cores_per_process=3).cores() == (6, 7)
    assert not plan_readers(3, EIGHT, workers=2, cores_per_process=3).own


@pytest.mark.parametrize("number", [2, 9])
def test_too_few_cores_leave_readers_unpinned(number: int) -> None:
    readers = plan_readers(number, EIGHT, workers=7)
    assert not readers.own
    assert readers.cores() == ()
    assert len(readers.placements) == number
    assert not any(placement.pin for placement in readers.placements)


def test_a_quota_sets_cores_aside_without_pinning() -> None:
    limited = Machine(tuple(LogicalCpu(n, n) for n in range(8)), quota=4.0)
    readers = plan_readers(2, limited, workers=2)
    assert readers.own
    assert not any(placement.pin for placement in readers.placements)
    workers = topology.plan(2, machine=limited, avoid=readers.cores())
    assert [len(p.cores) for p in workers.placements] == [1, 1]


def test_other_pools_are_avoided() -> None:
    assert plan_readers(2, EIGHT, workers=2, avoid=[6, 7]).cores() == (4, 5)
