"""Pictures of described machines."""

from __future__ import annotations

import dataclasses

from machines import container, flat, laptop, two_sockets

from nanotf.cli.picture import draw, ranges
from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.machine.topology import plan


def test_two_sockets_with_two_workers() -> None:
    assert draw(two_sockets(), plan(2, machine=two_sockets())).splitlines() == [
        "  socket 0",
        "  +-- NUMA node 0 ------------------+",
        "  | 00000000 00000000 00000000 0000 | cores 0-27, hyper-threads 56-83",
        "  +---------------------------------+",
        "  socket 1",
        "  +-- NUMA node 1 ------------------+",
        "  | 11111111 11111111 11111111 1111 | cores 28-55, hyper-threads 84-111",
        "  +---------------------------------+",
        "  0, 1, ...  a core of that worker",
    ]


def test_a_container_shows_which_cores_are_not_its_own() -> None:
    lines = draw(container(), plan(3, machine=container())).splitlines()
    assert lines[2] == "  | ----012.        | cores 0-7"
    assert lines[6] == "  | ....----        | cores 8-15"
    assert lines[8:] == [
        "  0, 1, ...  a core of that worker",
        "  .  a core that no worker has",
        "  -  a core that this process may not use",
    ]


def test_efficiency_and_offline_cores_are_told_apart() -> None:
    cpus = laptop().cpus
    machine = Machine((*cpus[:-1], dataclasses.replace(cpus[-1], online=False)))
    lines = draw(machine, plan(3, machine=machine)).splitlines()
    assert lines[2:4] == [
        "  | 001122          | cores 0,2,4,6,8,10, hyper-threads 1,3,5,7,9,11",
        "  | .......!        | efficiency cores 12-19",
    ]
    assert lines[-1] == "  !  a core that is offline"


def test_many_workers_and_long_lines() -> None:
    machine = flat(100)
    lines = draw(machine, plan(100, machine=machine)).splitlines()
    assert lines[2].startswith("  | 01234567 89abcdef ")
    assert lines[2].endswith("######## | cores 0-99")
    assert lines[3].split() == ["|", *["########"] * 4, "####", "|"]
    assert len({len(line) for line in lines[1:5] if "cores" not in line}) == 1
    assert lines[-2:] == [
        "  0, 1, ...  a core of that worker",
        "  #  a core of worker 36 or above",
    ]


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2,5"
    assert ranges([]) == ""


def test_unknown_cpus_are_drawn_too() -> None:
    machine = Machine((LogicalCpu(0, 0), LogicalCpu(1, 0), LogicalCpu(2, 1)))
    assert "hyper-threads 1" in draw(machine)
