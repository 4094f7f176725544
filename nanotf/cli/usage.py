"""The present use of the machine: load, busy processes, other pools, free memory.

Processes are named without their users and the options of their command lines, which may hold
secrets.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import time
from collections.abc import Set
from dataclasses import dataclass

import psutil

from nanotf.cli.shell import printable
from nanotf.machine.cpus import Machine
from nanotf.machine.neighbours import program, taken_cores

SECONDS = 0.5  # of the sample
_IDLE = 0.05  # cores; processes that use less are left out


@dataclass(frozen=True)
class BusyProcess:
    """A process that uses processor time."""

    name: str  # the program's name, on one line
    pid: int
    yours: bool  # whether it belongs to the user who asks
    cores: float  # processor time per time; 2.0 keeps two logical CPUs busy
    on_usable_cores: bool = True  # whether it may run on logical CPUs that this process may use


@dataclass(frozen=True)
class OtherPool:
    """A process with pinned workers of nanotf."""

    program: str  # the program and its script, with the process id
    pid: int
    cores: tuple[int, ...]  # the logical CPUs to which its workers are pinned


@dataclass(frozen=True)
class Usage:
    """The use of the machine while it was sampled."""

    load_averages: tuple[float, ...] = ()  # of the last 1, 5 and 15 minutes; empty if unknown
    # Logical CPUs that were busy on the whole machine. In a container this includes processes that
    # are not visible there.
    busy_cores: float = 0.0
    stolen_cores: float = 0.0  # logical CPUs that a hypervisor gave to other virtual machines
    processes: tuple[BusyProcess, ...] = ()  # the visible processes except this one, busiest first
    pools: tuple[OtherPool, ...] = ()
    memory_available: int | None = None  # bytes; None if unknown
    shm_free: int | None = None  # bytes in /dev/shm; None if there is none


def read_usage(machine: Machine, seconds: float = SECONDS) -> Usage:
    """Samples the use of this machine. Waits for the given time.

    Args:
        machine: its allowed logical CPUs count as usable.
        seconds: length of the sample.
    """
    allowed = {cpu.id for cpu in machine.allowed_cpus()}
    shm = pathlib.Path("/dev/shm")
    begin, of_processes, (busy, stolen) = time.monotonic(), _times_of_processes(), _times()
    time.sleep(seconds)
    passed = time.monotonic() - begin  # longer where all cores are busy
    busy_now, stolen_now = _times()
    used = {
        # A process that was not there before has used all of its time since.
        process: (now - of_processes.get(process, 0.0)) / passed
        for process, now in _times_of_processes().items()
    }
    processes = [_describe(p, cores, allowed) for p, cores in used.items() if cores >= _IDLE]
    return Usage(
        load_averages=_load_averages(),
        busy_cores=max(0.0, busy_now - busy) / passed,
        stolen_cores=max(0.0, stolen_now - stolen) / passed,
        processes=tuple(sorted(filter(None, processes), key=lambda p: (-p.cores, p.pid))),
        pools=tuple(
            OtherPool(printable(program(pid)), pid, cores)
            for pid, cores in sorted(taken_cores().items())
        ),
        memory_available=psutil.virtual_memory().available,
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else None,
    )


def _load_averages() -> tuple[float, ...]:
    try:
        return os.getloadavg()
    except OSError:  # a sandbox without /proc/loadavg
        return ()


def _times() -> tuple[float, float]:
    """Returns the machine's busy and stolen processor time in seconds."""
    times = psutil.cpu_times()._asdict()
    idle = times["idle"] + times.get("iowait", 0.0)
    # The kernel also counts the time of guests as user time.
    guests = times.get("guest", 0.0) + times.get("guest_nice", 0.0)
    stolen = times.get("steal", 0.0)
    return sum(times.values()) - idle - guests - stolen, stolen


def _times_of_processes() -> dict[psutil.Process, float]:
    """Returns the processor time of each visible process but this one, in seconds."""
    found = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has exited, or is hidden
            continue
        if process.pid != os.getpid():
            # psutil's hash includes the start, so another process with a reused id is a new key.
            found[process] = times.user + times.system
    return found


def _describe(process: psutil.Process, cores: float, allowed: Set[int]) -> BusyProcess | None:
    try:
        yours = process.uids().real == os.getuid()
        mask = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None  # not on macOS
        usable = mask is None or not allowed.isdisjoint(mask)
        # A process chooses its name, which may hold line ends.
        name = printable(process.name())
        return BusyProcess(name, process.pid, yours, cores, usable)
    except psutil.Error:  # it has exited
        return None
