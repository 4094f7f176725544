"""The parent's side of a pool's workers that run as Ray actors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import nanotf
from nanotf.errors import NanoError, PlacementError
from nanotf.machine import topology
from nanotf.pool import stalls
from nanotf.pool.handles import Worker
from nanotf.pool.hosts.remote import RemoteWorker, taken_over
from nanotf.pool.plans import RayPlan
from nanotf.pool.ray import ray_cluster
from nanotf.pool.ray.handle import ANSWER_SECONDS, RayProcess, RayWorker, is_connected
from nanotf.pool.ray.ray_bridge import Payloads, RayBridge
from nanotf.pool.ray.relay import CONCURRENCY_GROUPS, HANDOVER_BYTES, Relay, Started
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire import timing
from nanotf.wire.channel import Channel

PLACE_SECONDS = 60.0  # for Ray to find free CPUs
START_SECONDS = 60.0  # for an actor to start a process from a cold network file system
LOOPBACK = "127.0.0.1"
CLOCK_LOOKS = 5  # the quickest of this many answers gives the node's time most exactly

# The parent's variables that limit the cores of workers on its own node; see `topology.plan`.
LIMITS = ("OMP_NUM_THREADS", "NANOTF_ENV")


@dataclasses.dataclass(frozen=True)
class _Post:
    """The place of a worker."""

    relay: Any  # the handle of its `Relay`
    node: str  # the node's id
    address: str  # the node's
    placement: topology.Placement
    # Identifies the channel that the relay hands to the parent.
    token: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(HANDOVER_BYTES))


class RayCrew:
    """Starts a pool's workers through Ray.

    Args:
        transport: with "shm" all workers are on this process's node. With "grpc" Ray packs
            them on as few nodes as it can.
        key: the pool's secret key.
    """

    hosts = None  # with "grpc" TensorFlow connects the nodes

    def __init__(self, plan: RayPlan, transport: str, key: bytes) -> None:
        self.here, self.deadline = plan, stalls.stall_seconds()
        self.workers: list[Worker] = []
        self._plan, self._transport, self._key = plan, transport, key
        self._relays: list[Any] = []
        self._group: Any = None  # a placement group of Ray's

    def start(self) -> None:
        """Starts the workers.

        Raises:
            PlacementError: The cluster has too few CPUs, or a node too few cores.
            NanoError: Ray or a node failed to start a worker.
        """
        self._ray = ray = ray_cluster.connect()
        self._session = ray_cluster.session(ray)
        home = ray.get_runtime_context().get_node_id()
        cpus = ray_cluster.cpus_by_node(ray)
        allowed = [cpus.get(home, 0)] if self._transport == "shm" else list(cpus.values())
        share = ray_cluster.share(allowed, self._plan.size, self._plan.cores_per_process)
        relays = self._make_relays(share, home)
        self._check_versions(relays)
        posts = self._posts(relays, share, cpus, home)
        with _listener(self._plan.size) as (listener, name):
            started = self._start_workers(posts, home, name)
            handed = [post.token for post, s in zip(posts, started, strict=True) if s.direct]
            direct = _receive(listener, handed)
        payloads = Payloads(ray, len(posts) - len(direct))
        several = len({post.node for post in posts}) > 1
        for post, s in zip(posts, started, strict=True):
            process = RayProcess(ray, self._session, post.relay, s.pid)
            address = post.address if several else LOOPBACK
            if s.direct:
                worker: Worker = RayWorker(
                    post.placement, process, *direct[post.token], host=address
                )
            else:
                ahead = self._ahead(post.relay)
                bridge = RayBridge(ray, post.relay, self._key, payloads, ahead)
                place = f"node {address}"
                worker = RemoteWorker(
                    post.placement, process, address, place, bridge.channel, bridge
                )
            self.workers.append(worker)

    def _start_workers(self, posts: Sequence[_Post], home: str, name: str) -> list[Started]:
        """Makes the relays start workers; those on this node connect to the socket `name`."""
        directory = str(pathlib.Path.cwd())
        started: list[Started] = self._get(
            [
                post.relay.start.remote(
                    post.placement,
                    self._key,
                    self._transport,
                    taken_over(os.environ),
                    directory,
                    (name, post.token) if post.node == home else None,
                )
                for post in posts
            ],
            START_SECONDS,
            "started a worker",
        )
        others = [s for s in started if not s.direct]
        if self._transport == "shm" and others:
            raise PlacementError(
                "transport='shm' needs all workers on this process's node, with shared memory. "
                f"Received: {len(others)} of {len(started)} workers that cannot be reached over a "
                "Unix socket, as in another container. Use transport='grpc'."
            )
        return started

    def take_connections(self, rank: int) -> list[int]:
        return []

    def close(self) -> None:
        """Ends the actors and returns the CPUs to Ray."""
        nothing = not self._relays and self._group is None
        if nothing or not is_connected(self._ray, self._session):
            return
        for relay in self._relays:
            self._ray.kill(relay)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._relays, self._group = [], None

    # ------------------------------------------------------------------------ placement
    def _make_relays(self, share: int, home: str) -> list[Any]:
        ray, size = self._ray, self._plan.size
        from ray.util import scheduling_strategies as strategies

        if self._transport == "shm":  # not soft: workers share this node's memory
            there: list[Any] = [strategies.NodeAffinitySchedulingStrategy(home, soft=False)] * size
        else:
            self._group = ray.util.placement_group([{"CPU": share}] * size, strategy="PACK")
            there = [
                strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
                for bundle in range(size)
            ]
        kind = ray.remote(num_cpus=share, max_restarts=0, concurrency_groups=CONCURRENCY_GROUPS)(
            Relay
        )
        self._relays = [kind.options(scheduling_strategy=strategy).remote() for strategy in there]
        return self._relays

    def _check_versions(self, relays: Sequence[Any]) -> None:
        versions = self._get(
            [relay.version.remote() for relay in relays], PLACE_SECONDS, "found the CPUs"
        )
        others = sorted(set(versions) - {nanotf.__version__})
        if others:
            raise NanoError(
                "All nodes must have the same nanotf. Received: "
                f"{nanotf.__version__} here, and {', '.join(others)} on nodes of the cluster."
            )

    def _get(self, references: Sequence[Any], seconds: float, what: str) -> list[Any]:
        try:
            return list(self._ray.get(list(references), timeout=seconds))
        except self._ray.exceptions.GetTimeoutError as error:
            free = self._ray.available_resources().get("CPU", 0)
            raise PlacementError(
                f"Ray has not {what} for all workers within {seconds:.0f} s. Received: "
                f"num_processes={self._plan.size}, and a cluster with {free:g} CPUs free. End "
                "what else holds CPUs there, or ask for less: cores_per_process=..."
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, NanoError):  # its text has the remedy
                raise type(cause)(str(cause)) from error
            raise _start_error(error) from error
        except self._ray.exceptions.RayError as error:
            raise _start_error(error) from error

    def _posts(
        self, relays: Sequence[Any], share: int, cpus: dict[str, int], home: str
    ) -> list[_Post]:
        """Returns the posts by rank: this process's node first. One relay plans for its node."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        ids = self._get([relay.node.remote() for relay in relays], START_SECONDS, "asked")
        on: dict[str, list[Any]] = {}
        for node, relay in sorted(
            zip(ids, relays, strict=True), key=lambda place: (place[0] != home, place[0])
        ):
            on.setdefault(node, []).append(relay)
        limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
        planned = self._get(
            [
                there[0].plan.remote(
                    len(there),
                    self._plan.cores_per_process,
                    _part(len(there), share, cpus[node]),
                    limits if node == home else {},
                )
                for node, there in on.items()
            ],
            START_SECONDS,
            "planned",
        )
        found: list[_Post] = []
        for (node, there), placements in zip(on.items(), planned, strict=True):
            for relay, place in zip(there, placements, strict=True):
                placement = dataclasses.replace(place, rank=len(found))
                found.append(_Post(relay, node, addresses[node], placement))
        return found

    def _ahead(self, relay: Any) -> int:
        """Returns the nanoseconds by which this process's clock is ahead of a relay's clock."""
        looks: list[tuple[int, int]] = []
        for _ in range(CLOCK_LOOKS):
            before = timing.now()
            there = self._ray.get(relay.clock.remote(), timeout=ANSWER_SECONDS)
            after = timing.now()
            looks.append((after - before, (before + after) // 2 - there))
        return min(looks)[1]


def _part(count: int, share: int, cpus: int) -> float:
    """Returns the part of a node's CPUs for its workers, with any rest too small for another."""
    return 1.0 if (count + 1) * share > cpus else count * share / cpus


def _start_error(error: BaseException) -> NanoError:
    return NanoError(
        "Every node of the Ray cluster must have nanotf and TensorFlow, in the Python that Ray was "
        f"started with. Received: {type(error).__name__}: {error}"
    )


# ----------------------------------------------------------------------------- the handover
@contextlib.contextmanager
def _listener(size: int) -> Iterator[tuple[socket.socket, str]]:
    """Yields a Unix socket on which relays of this node hand over channels, and its name."""
    with (
        tempfile.TemporaryDirectory(prefix="nanotf-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
    ):
        name = str(pathlib.Path(directory) / "handover")  # no other user can enter the directory
        sock.bind(name)
        sock.listen(size)
        sock.settimeout(ANSWER_SECONDS)
        yield sock, name


def _receive(
    listener: socket.socket, tokens: Sequence[bytes]
) -> dict[bytes, tuple[Channel, WorkerLog]]:
    """Returns the channels and logs that relays have sent already, by token."""
    found: dict[bytes, tuple[Channel, WorkerLog]] = {}
    while len(found) < len(tokens):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            token, fds, _, _ = socket.recv_fds(connection, HANDOVER_BYTES, 2)
        if token not in tokens or len(fds) != 2:
            raise NanoError("Rejected an unauthenticated connection to the Ray workers' socket.")
        for fd in fds:
            os.set_inheritable(fd, False)
        found[token] = Channel(socket.socket(fileno=fds[0])), WorkerLog(fds[1])
    return found
