"""Cores of other pools, and the remaining cores."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nanotf import console
from nanotf.errors import InvalidArgumentTypeError, PlacementError
from nanotf.machine import neighbours, topology
from nanotf.pool import warm

EIGHT = topology.Machine(tuple(topology.LogicalCpu(n, n) for n in range(8)))


def _process(proc: pathlib.Path, pid: int, name: str, cores: str, parent: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "comm").write_text(f"{name}\n")
    status = f"Name:\t{name}\nPPid:\t{parent}\nCpus_allowed_list:\t{cores}\n"
    (proc / str(pid) / "status").write_text(status)


def test_process_table_lists_the_taken_cores(tmp_path: pathlib.Path) -> None:
    pinned, zygote = neighbours.PINNED, neighbours.ZYGOTE
    _process(tmp_path, 10, "python", "0-7", 1)
    _process(tmp_path, 11, zygote, "0-7", 10)
    _process(tmp_path, 12, pinned, "0-1", 11)
    _process(tmp_path, 13, pinned, "2", 11)
    _process(tmp_path, 14, pinned, "2", 13)  # a fork of a worker
    _process(tmp_path, 20, "python", "0-7", 1)
    _process(tmp_path, 21, pinned, "5", 20)  # a rank
    _process(tmp_path, 41, zygote, "0-7", os.getpid())
    _process(tmp_path, 42, pinned, "6,7", 41)
    _process(tmp_path, 61, pinned, "3", 60)  # whose parent has exited
    (tmp_path / "71").mkdir()
    assert neighbours.taken_cores(tmp_path) == {10: (0, 1, 2), 20: (5,)}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, tuple[int, ...]]]:
    """Cores of other pools, on a machine of eight cores."""
    found: dict[int, tuple[int, ...]] = {}
    monkeypatch.setattr(neighbours, "taken_cores", lambda: found)
    monkeypatch.setattr(topology, "describe_machine", lambda: EIGHT)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    neighbours.forget()
    yield found
    neighbours.forget()


def test_plan_avoids_cores_of_other_pools(taken: dict[int, tuple[int, ...]]) -> None:
    taken[10] = (0, 1, 2, 3)
    assert [p.cores for p in neighbours.plan(2).placements] == [(4, 5), (6, 7)]


def test_pool_keeps_its_cores_while_others_come_and_go(taken: dict[int, tuple[int, ...]]) -> None:
    before = neighbours.plan(2)
    assert before == topology.plan(2, machine=EIGHT)
    taken[10] = (0, 1, 2, 3)
    assert neighbours.plan(2) == before
    assert neighbours.plan(4) != topology.plan(4, machine=EIGHT)
    neighbours.forget()
    assert neighbours.plan(2) != before


def test_sharing_of_too_few_cores_is_reported(
    taken: dict[int, tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console.lines, "_warned", set())
    taken[4711] = tuple(range(7))
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        assert neighbours.plan(2) == topology.plan(2, machine=EIGHT)
        neighbours.forget()
        taken[4712] = (7,)  # once in total, not once per new pool
        neighbours.plan(2)
        neighbours.plan(3)
    (record,) = caplog.records
    assert "share the logical CPUs [0, 1, 2, 3, 4, 5, 6]" in record.getMessage()
    assert "4711" in record.getMessage()


def test_cores_that_are_named(taken: dict[int, tuple[int, ...]]) -> None:
    taken[10] = (0, 1, 2, 3)
    assert [p.cores for p in neighbours.plan(2, cores=[1, 3]).placements] == [(1,), (3,)]
    with pytest.raises(PlacementError, match=r"cores=\[1, 99\]"):
        neighbours.plan(2, cores=[1, 99])
    with pytest.raises(InvalidArgumentTypeError, match="cores=2"):
        neighbours.plan(2, cores=2)  # type: ignore[arg-type]


def test_a_fork_checks_for_other_pools_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork must not reuse its parent's plan."""
    monkeypatch.setattr(neighbours, "_last", [object()])
    child = os.fork()
    if child == 0:
        os._exit(0 if not warm.neighbours._last else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_program_is_named_without_its_options(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(flush=True); input()")
    command = [sys.executable, str(script), "--password", "secret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        named = neighbours.program(process.pid)
        process.communicate(b"\n")
    assert named == f"{pathlib.Path(sys.executable).name} train.py (process {process.pid})"
    assert neighbours.program(process.pid) == f"process {process.pid}"
