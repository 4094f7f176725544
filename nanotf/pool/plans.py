"""What workers a pool has: where each of them runs, or who decides that."""

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
        """As `Plan.like_nodes`: 1, since nobody knows the cores before the workers run."""
        return 1


AnyPlan = topology.Plan | RayPlan
