"""Resources of this process other than cores: memory, `/dev/shm`, limits of the system."""

from __future__ import annotations

import pathlib
import resource
import shutil
from dataclasses import dataclass

import psutil

from nanotf.machine.cgroups import read_limits


@dataclass(frozen=True)
class System:
    """Resources that a process may use. None means no limit or unknown."""

    memory: int | None = None  # the machine's memory in bytes
    memory_limit: int | None = None  # bytes that the control groups allow
    shm: int | None = None  # the size of `/dev/shm` in bytes
    # The soft limits that `ulimit` sets: `-n`, `-u` and `-v`, the last in bytes.
    open_files: int | None = None
    processes: int | None = None
    address_space: int | None = None

    def usable_memory(self) -> int | None:
        """Returns the bytes that this process and its workers can use."""
        given = [n for n in (self.memory, self.memory_limit) if n is not None]
        return min(given, default=None)


def read_system() -> System:
    """Reads the resources of this machine and this process."""
    shm = pathlib.Path("/dev/shm")
    return System(
        memory=psutil.virtual_memory().total,
        memory_limit=read_limits(pathlib.Path("/")).memory,
        shm=shutil.disk_usage(shm).total if shm.is_dir() else None,
        open_files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        address_space=_soft(resource.RLIMIT_AS),
    )


def _soft(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit
