"""The CPUs that Ray holds for a pool's workers, and the hosts that lend those of other nodes."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from nanotf.console import logger
from nanotf.errors import NanoError, PlacementError
from nanotf.machine import neighbours
from nanotf.machine.cluster import Cluster
from nanotf.pool import interrupts
from nanotf.pool.handles import Crew
from nanotf.pool.hosts import members
from nanotf.pool.hosts.crew import HostsCrew, check_between_hosts
from nanotf.pool.hosts.members import Hosts
from nanotf.pool.local import LocalCrew
from nanotf.pool.plans import HostsPlan
from nanotf.pool.ray import ray_cluster
from nanotf.pool.ray.ray_agent import RayAgent, name_of
from nanotf.pool.starts import takes_seconds

PLACE_SECONDS = 60.0  # for Ray to find free CPUs
RETURN_SECONDS = 60.0  # for Ray to restart an agent; then the other hosts get its workers
POLL_SECONDS = 0.2
END_SECONDS = 5.0  # for agents
LOOPBACK = "127.0.0.1"
SECRET_NBYTES = 32
NODE_LABEL = "ray.io/node-id"  # which Ray gives every node

# Those of the last pool, if Ray started it. `warm` holds its lock whenever this is used.
_kept: list[RayHosts] = []


def crew_of(plan: HostsPlan, transport: str, key: bytes) -> Crew:
    """Returns the crew that starts the workers of a plan.

    A pool that replaces one with the same plan, for example since a worker has died, gets the same
    CPUs: other programs that wait for some do not come first.

    Raises:
        PlacementError: The cluster has too few CPUs.
        NanoError: Ray or a node fails, or the workers cannot use this transport.
    """
    if _kept and not _kept[0].serves(plan):
        release()
    if not _kept:
        _kept.append(RayHosts(plan, transport))
    try:
        return _kept[0].crew(transport, key)
    except BaseException:
        release()
        raise


def release() -> None:
    """Returns the CPUs to Ray, if there are any."""
    while _kept:
        try:
            _kept[-1].close()
        finally:
            _kept.pop()


def holds(plan: HostsPlan) -> bool:
    """Returns True if this process holds the CPUs for a plan, in the present Ray."""
    return bool(_kept) and _kept[0].serves(plan)


class RayHosts:
    """This process's node and the others with workers of one plan.

    Raises:
        PlacementError, NanoError: As `crew_of`.
    """

    def __init__(self, plan: HostsPlan, transport: str) -> None:
        takes_seconds("Ray")
        self._plan, self._owner = plan, os.getpid()
        self._ray = ray = ray_cluster.connect()
        self._session = ray_cluster.session(ray)
        home = ray.get_runtime_context().get_node_id()
        cpus = ray_cluster.cpus_by_node(ray)
        own = cpus.pop(home, 0)
        share, counts = ray_cluster.divide(
            own, list(cpus.values()), plan.size, plan.cores_per_process
        )
        if len(counts) > 1:
            check_between_hosts(transport)
        self._part = ray_cluster.part(counts[0], share, own)
        self._hosts: Hosts | None = None  # None if all workers are on this node
        self._agents: list[Any] = []
        self._runs: list[Any] = []  # the results of `RayAgent.run`, each of which is an error
        self._group: Any = None
        try:
            with interrupts.deferred():  # nobody else knows the group, which holds the CPUs
                self._group = ray.util.placement_group(
                    [{"CPU": count * share} for count in counts],
                    strategy="STRICT_SPREAD",
                    bundle_label_selector=[
                        {NODE_LABEL: home},
                        *[{NODE_LABEL: f"!{home}"}] * (len(counts) - 1),
                    ],
                )
            if not self._group.wait(PLACE_SECONDS):
                free = ray.available_resources().get("CPU", 0)
                raise PlacementError(
                    f"Ray has not found the CPUs for all workers within {PLACE_SECONDS:.0f} s. "
                    f"Received: num_processes={plan.size}, and a cluster with {free:g} CPUs free. "
                    "End what else holds CPUs there, or ask for less: cores_per_process=..."
                )
            if len(counts) > 1:
                self._open(counts, share)
                self._wait_for_agents(members.join_seconds())
        except BaseException as error:
            with interrupts.held_back(error):
                self.close()
            raise

    def _open(self, counts: list[int], share: int) -> None:
        """Listens for the other nodes' agents, and starts them."""
        ray = self._ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node_of = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        addresses = [address_of[node_of[host]] for host in range(len(counts))]
        names = tuple(name_of(host, address) for host, address in enumerate(addresses))
        # Nodes with one address are on one machine.
        address = addresses[0] if len(set(addresses)) > 1 else LOOPBACK
        secret = secrets.token_bytes(SECRET_NBYTES)
        try:
            self._hosts = Hosts(
                Cluster(names, names[0], "Ray", tuple(counts)),
                counts[0],
                secret,
                address,
                (0,),
                self._part,
            )
        except OSError as error:
            raise NanoError(
                "This process listens on the address by which Ray knows its node. Received: "
                f"{address}: {error.strerror}. Start Ray here with --node-ip-address and the "
                "address of a network interface of this machine."
            ) from error
        for host, count in enumerate(counts[1:], 1):
            agent = (
                ray.remote(RayAgent)
                .options(
                    num_cpus=count * share,
                    max_restarts=-1,
                    max_task_retries=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, host),
                )
                .remote()
            )
            self._agents.append(agent)
            self._runs.append(
                agent.run.remote(names, host, count, share, secret, self._hosts.address)
            )

    def _wait_for_agents(self, seconds: float) -> None:
        """Waits until all other nodes lend their workers.

        Raises:
            NanoError: One cannot, or has not joined after these seconds.
        """
        hosts, deadline = self._hosts, time.monotonic() + seconds
        assert hosts is not None, "there are others"
        while len(hosts.members()) < len(self._agents):
            failed, _ = self._ray.wait(self._runs, timeout=POLL_SECONDS, fetch_local=False)
            if failed:
                self._raise_from(failed[0])
            if time.monotonic() > deadline:
                there = {member.index for member in hosts.members()}
                missing = [n for i, n in enumerate(hosts.cluster.hosts) if i and i not in there]
                raise NanoError(
                    f"All nodes with workers must join within {seconds:.0f} s. Received: "
                    f"nothing from {', '.join(missing)}; this process listens on "
                    f"{hosts.address[0]} port {hosts.address[1]}. See that all TCP ports between "
                    "the nodes are open."
                )

    def _raise_from(self, failed: Any) -> None:
        try:
            self._ray.get(failed)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, NanoError):  # its text has the remedy
                raise type(cause)(str(cause)) from error
            raise NanoError(
                "Every node of the Ray cluster must have nanotf and TensorFlow, in the Python that "
                f"Ray was started with. Received: {type(error).__name__}: {error}"
            ) from error

    def serves(self, plan: HostsPlan) -> bool:
        """Returns True if this process holds the CPUs for a plan, and all agents may lend them."""
        same = (plan, os.getpid()) == (self._plan, self._owner)
        return same and self._is_connected() and not self._ended()

    def _ended(self) -> bool:
        """Returns True if an agent has ended by itself: Ray restarts only actors that die."""
        ended, _ = self._ray.wait(self._runs, timeout=0) if self._runs else ([], [])
        return bool(ended)

    def _is_connected(self) -> bool:
        ray = self._ray
        return bool(ray.is_initialized() and ray_cluster.session(ray) == self._session)

    def crew(self, transport: str, key: bytes) -> Crew:
        """Returns the crew for a pool. Waits for hosts that were lost to come back."""
        plan = self._plan
        if self._hosts is None:
            here = neighbours.plan(plan.size, plan.cores_per_process, part=self._part)
            return LocalCrew(here, transport, key)
        try:
            self._wait_for_agents(RETURN_SECONDS)
        except NanoError as error:
            logger.warning("The other hosts get the workers of those that are lost. %s", error)
        return HostsCrew(self._hosts, plan, transport, key)

    def close(self) -> None:
        """Ends the agents, and returns the CPUs to Ray."""
        if self._owner != os.getpid():  # after a fork, all is the parent's
            return
        try:
            if self._hosts is not None:
                self._hosts.dismiss(0)
            if self._runs and self._is_connected():
                # Ray reports actors that are killed in the middle of a call.
                self._ray.wait(self._runs, num_returns=len(self._runs), timeout=END_SECONDS)
        finally:  # Ctrl-C too
            if self._is_connected():
                for agent in self._agents:
                    self._ray.kill(agent)
                if self._group is not None:
                    self._ray.util.remove_placement_group(self._group)
