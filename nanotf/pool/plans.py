"""Plans for a pool's workers: the place of each one, or the number that hosts place."""

from __future__ import annotations

import dataclasses

from nanotf.machine import topology


@dataclasses.dataclass(frozen=True)
class HostsPlan:
    """Workers on one host or several; each host chooses the cores."""

    size: int  # on all hosts
    cores_per_process: int | None = None  # None for equal shares
    backend: str = "hosts"  # those of a run; or "ray": those that Ray chooses


AnyPlan = topology.Plan | HostsPlan
