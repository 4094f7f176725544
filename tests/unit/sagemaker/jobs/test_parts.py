"""The cores of simulated hosts."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from nanotf.machine.cpus import LogicalCpu, Machine, describe_machine
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.jobs import commands, launch, simulated_hosts
from nanotf.sagemaker.jobs.record import JobRequest
from nanotf.sagemaker.jobs.simulated_hosts import SimulatedHost
from nanotf.sagemaker.jobs.source import SourceCode

# Two NUMA nodes with two cores of two hyper-threads: cores 0 to 3, siblings 4 to 7.
CPUS = tuple(LogicalCpu(n, n % 4, numa_node=n % 4 // 2) for n in range(8))


def test_hosts_get_whole_cores_of_their_own() -> None:
    machine = Machine(CPUS)
    assert simulated_hosts.divide(2, 1, machine) == [
        SimulatedHost(2, frozenset({0, 1, 4, 5})),
        SimulatedHost(2, frozenset({2, 3, 6, 7})),
    ]
    assert simulated_hosts.divide(3, 1, machine)[2].cores == 1  # equal shares; a core is left over


def test_one_host_has_all_cores_and_is_not_bound() -> None:
    assert simulated_hosts.divide(1, 2, Machine(CPUS)) == [SimulatedHost(4)]


def test_a_mask_is_divided() -> None:
    """The mask holds core 1 without its sibling."""
    machine = Machine(CPUS, affinity=frozenset({0, 4, 1}))
    assert [part.mask for part in simulated_hosts.divide(2, 1, machine)] == [{0, 4}, {1}]


def test_hosts_share_cores_if_there_are_too_few() -> None:
    machine = Machine(CPUS, affinity=frozenset({0, 1, 2}))
    assert [part.mask for part in simulated_hosts.divide(2, 2, machine)] == [{0, 1}, {2, 0}]
    assert [part.mask for part in simulated_hosts.divide(5, 1, machine)] == [
        {0},
        {1},
        {2},
        {0},
        {1},
    ]


def test_a_share_that_fits_no_node_still_has_a_core_for_each_worker() -> None:
    """On nodes of 19 and 21 cores, four shares of 9 straddle no node. Ten workers need 10 cores."""
    machine = Machine(tuple(LogicalCpu(n, n, numa_node=int(n >= 19)) for n in range(40)))
    for workers, cores in ((9, 9), (10, 10)):
        assert [part.cores for part in simulated_hosts.divide(4, workers, machine)] == [cores] * 4


def test_a_quota_binds_to_no_particular_cores() -> None:
    machine = Machine(CPUS, quota=2.0)
    assert simulated_hosts.divide(2, 1, machine) == [SimulatedHost(1), SimulatedHost(1)]
    assert simulated_hosts.divide(2, 2, machine) == [SimulatedHost(2), SimulatedHost(2)]


def test_scripts_of_simulated_hosts_see_their_own_cores(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = describe_machine()
    if len(machine.usable_cores()) < 2 or machine.is_quota_limited() or not machine.can_pin:
        pytest.skip("needs two cores to which processes can be bound")
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    code = (
        "import json, os\nprint(json.dumps([os.environ['SM_NUM_CPUS'], *os.sched_getaffinity(0)]))"
    )
    (tmp_path / "train.py").write_text(code)
    # Without `nanotf run`, which would wait for the other host.
    monkeypatch.setattr(commands.source, "command", lambda *_: [sys.executable, "train.py"])
    request = JobRequest("a", SourceCode(str(tmp_path / "train.py")), instances=2)
    job = launch.start(request, tmp_path / "jobs")
    before = os.sched_getaffinity(0)
    found = []
    for program in commands.begin(job, request, sys.executable, [], {}):
        said, errors = program.process.communicate(timeout=60)
        assert program.process.returncode == 0, errors
        found.append(json.loads(said))
    assert os.sched_getaffinity(0) == before
    expected = simulated_hosts.divide(2, 1, machine)
    assert [(int(count), set(mask)) for count, *mask in found] == [
        (part.cores, part.mask) for part in expected
    ]
    assert not expected[0].mask & expected[1].mask  # type: ignore[operator]


def test_a_host_that_cannot_have_its_workers_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").touch()
    many = str(len(describe_machine().usable_cores()) + 1)
    request = JobRequest(
        "a", SourceCode(str(tmp_path / "train.py")), num_processes=many, instances=2
    )
    with pytest.raises(ValueError, match="Every worker needs cores of its own"):
        launch.check(request)


def test_a_process_is_born_bound() -> None:
    mask = frozenset(list(os.sched_getaffinity(0))[:1])
    code = "import os; print(*os.sched_getaffinity(0))"
    with simulated_hosts.bound(SimulatedHost(1, mask)):
        said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert {int(cpu) for cpu in said.split()} == mask
