"""The command `nanotf`, for more ranks than this machine has cores: they run unpinned."""

from __future__ import annotations

import os
import sys
from typing import Any

from nanotf.machine import topology


def plan(num_processes: int, *_: Any, **__: Any) -> topology.Plan:
    """Returns a plan in which workers share cores, which `topology.plan` refuses."""
    cores = sorted(os.sched_getaffinity(0))
    return topology.Plan(
        tuple(
            topology.Placement(rank, (cores[rank % len(cores)],), None, pin=False)
            for rank in range(num_processes)
        )
    )


if __name__ == "__main__":
    topology.plan = plan  # type: ignore[assignment]
    from nanotf.cli import main

    sys.exit(main())
