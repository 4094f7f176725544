"""The sample of processor time: real processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
from machines import flat

from nanotf.cli import usage
from nanotf.cli.usage import read_usage
from nanotf.machine.topology import describe_machine


def test_a_busy_process_is_found_with_its_cores() -> None:
    spinning = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1
    )
    try:
        assert spinning.stdout is not None
        spinning.stdout.readline()  # it spins from here
        found = read_usage(describe_machine())
    finally:
        spinning.kill()
        spinning.communicate()
    (process,) = (process for process in found.processes if process.pid == spinning.pid)
    assert process.yours
    assert process.on_usable_cores
    assert process.cores < 4  # 1, unless this process was paused between the two readings
    assert found.busy_cores > 0
    assert len(found.load_averages) == 3
    assert os.getpid() not in {process.pid for process in found.processes}
    assert found.memory_available


def test_processes_on_other_cores_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda process: [4, 5], raising=False)
    own = psutil.Process()
    for allowed, usable in (({0, 1}, False), ({5, 6}, True)):
        found = usage._describe(own, 1.0, allowed)
        assert found is not None
        assert found.on_usable_cores == usable


def test_a_process_that_exits_during_the_sample_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(process: psutil.Process) -> str:
        raise psutil.NoSuchProcess(process.pid)

    before = {psutil.Process(): 0.0}
    after = {psutil.Process(): 10.0}
    times = iter([before, after, before, after])
    monkeypatch.setattr(usage, "_times_of_processes", lambda: next(times))
    assert [p.pid for p in read_usage(flat(4), 0.01).processes] == [os.getpid()]
    monkeypatch.setattr(psutil.Process, "name", gone)
    assert read_usage(flat(4), 0.01).processes == ()


def test_a_sandbox_may_hide_the_load_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> tuple[float, ...]:
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(os, "getloadavg", hidden)
    assert read_usage(flat(1), 0.01).load_averages == ()


def test_the_name_of_a_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "name", lambda process: "tr\nain")
    found = usage._describe(psutil.Process(), 1.0, {0})
    assert found is not None
    assert found.name == r"'tr\nain'"
