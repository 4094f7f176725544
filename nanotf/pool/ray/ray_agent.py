"""The actor on another node: the agent that lends the workers of that node.

Importing this module needs neither Ray nor TensorFlow; `ray_hosts` makes an actor of `RayAgent`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from nanotf.machine.cluster import Cluster
from nanotf.pool.hosts.agent import LOST_CODE, Agent
from nanotf.pool.ray import ray_cluster
from nanotf.wire import network

# Variables that Ray sets for its own processes; the first would limit the cores like the user's.
RAYS_OWN = ("OMP_NUM_THREADS", "SPT_NOENV", "PYTHONBREAKPOINT")


class RayAgent:
    """An actor on a node with workers."""

    def __init__(self) -> None:
        for name in RAYS_OWN:
            os.environ.pop(name, None)

    def run(
        self,
        names: Sequence[str],
        host: int,
        workers: int,
        share: int,
        secret: bytes,
        first: tuple[str, int],
    ) -> None:
        """Lends workers until the parent needs them no longer.

        Ray calls this again in a new process if this one ends.

        Args:
            names: the hosts' when they were first placed.
            host: this one's index.
            share: Ray's CPUs of each worker.
            secret: the hosts'.
            first: the address and port of the parent.

        Raises:
            NanoError: The parent did not answer, or refused this host.
        """
        ray: Any = importlib.import_module("ray")
        address = ray.util.get_node_ip_address()
        own = name_of(host, address)  # after a restart, this may be another node
        cpus = ray_cluster.cpus_by_node(ray)[ray.get_runtime_context().get_node_id()]
        agent = (
            Cluster((*names[:host], own, *names[host + 1 :]), own, "Ray", (None,) * len(names)),
            workers,
            secret,
            first[0] if network.is_loopback(first[0]) else address,
            (first[0], first[1:]),
            ray_cluster.part(workers, share, cpus),
        )
        # A connection may break although both ends live. Ray ends the actors of a dead parent.
        while Agent(*agent).run() == LOST_CODE:
            pass


def name_of(host: int, address: str) -> str:
    """Returns the name of a host, which differs from those of all others."""
    return f"ray-{host} ({address})"
