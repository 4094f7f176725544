"""Plans for a pool's workers: the place of each one, or the number that Ray places."""

from __future__ import annotations

import dataclasses

from nanotf.machine import topology


@dataclasses.dataclass(frozen=True)
class RayPlan:
    """Workers for which Ray chooses the nodes, and each node chooses the cores.

    Args:
        size: int, number of workers.
        cores_per_process: int or None for equal shares of the cluster.
    """

    size: int
    cores_per_process: int | None = None

    def like_nodes(self) -> int:
        """Returns 1, as `Plan.like_nodes` may: the cores are unknown before the workers run."""
        return 1


@dataclasses.dataclass(frozen=True)
class HostsPlan:
    """Workers on the hosts of a run; each host chooses the cores.

    Args:
        size: int, number of workers on all hosts.
        cores_per_process: int or None for equal shares of each host.
    """

    size: int
    cores_per_process: int | None = None


AnyPlan = topology.Plan | RayPlan | HostsPlan
