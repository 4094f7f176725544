"""Plans of a pool's workers: the place of each, or who decides it."""

from __future__ import annotations

import dataclasses

from nanotf.machine import topology


@dataclasses.dataclass(frozen=True)
class RayPlan:
    """Workers for which Ray finds the nodes, and each node the cores.

    Args:
        size: int, number of workers.
        cores_per_process: int or None for equal shares of what the cluster has.
    """

    size: int
    cores_per_process: int | None = None

    def like_nodes(self) -> int:
        """Returns 1: the cores are unknown before the workers run. See `Plan.like_nodes`."""
        return 1


AnyPlan = topology.Plan | RayPlan
