"""Plans for a pool's workers: the place of each one, or the number that others place."""

from __future__ import annotations

import dataclasses

from nanotf.machine import topology


@dataclasses.dataclass(frozen=True)
class RayPlan:
    """Workers for which Ray chooses the nodes, and each node chooses the cores."""

    size: int
    cores_per_process: int | None = None  # None for equal shares of the cluster

    def like_nodes(self) -> int:
        """Returns 1, as `Plan.like_nodes` may: the cores are unknown before the workers run."""
        return 1


@dataclasses.dataclass(frozen=True)
class HostsPlan:
    """Workers on the hosts of a run; each host chooses the cores."""

    size: int  # on all hosts
    cores_per_process: int | None = None  # None for equal shares of each host


AnyPlan = topology.Plan | RayPlan | HostsPlan
