"""The workers of a pool, as actors of Ray: the parent's side."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pathlib
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

import nanotf
from nanotf import stalls, timing, topology
from nanotf.backends import RayPlan
from nanotf.channel import Channel
from nanotf.errors import NanoError, PlacementError, describe_exit
from nanotf.on_ray import cluster
from nanotf.on_ray.bridge import Bridge, Payloads, describe
from nanotf.on_ray.relay import CONCURRENCY_GROUPS, HANDOVER_BYTES, Relay, Started
from nanotf.worker_process import Worker

PLACE_SECONDS = 60.0  # for Ray to find the CPUs, which others may have
START_SECONDS = 60.0  # for an actor to start a process, from a cold network file system
ANSWER_SECONDS = 5.0  # for what a relay knows without waiting for anything
LOST = -9  # as if by SIGKILL
CLOCK_LOOKS = 5  # the quickest of so many answers says best what time it is there

# The parent's variables that limit the cores of workers on its own node; see `topology.plan`.
LIMITS = ("OMP_NUM_THREADS", "NANOTF_ENV")

logger = logging.getLogger("nanotf")


class RayCrew:
    """Starts a pool's workers through Ray.

    Args:
        plan: `backends.RayPlan`.
        transport: str. With "shm" all workers are on this process's node. With "grpc" Ray packs
            them on as few nodes as it can.
        key: bytes, the pool's secret key.
    """

    def __init__(self, plan: RayPlan, transport: str, key: bytes) -> None:
        self.workers: list[RayWorker] = []
        self._plan, self._transport, self._key = plan, transport, key
        self._relays: list[Any] = []
        self._group: Any = None  # a placement group of Ray's

    def start(self) -> None:
        """Starts the workers.

        Raises:
            PlacementError: There are not enough CPUs, or a node not enough cores.
            NanoError: Ray, or a node, does not do what is needed.
        """
        self._ray = ray = cluster.connect()
        self._session = ray.get_runtime_context().get_job_id()
        home = ray.get_runtime_context().get_node_id()
        cpus = cluster.cpus_by_node(ray)
        allowed = [cpus.get(home, 0)] if self._transport == "shm" else list(cpus.values())
        share = cluster.share(allowed, self._plan.size, self._plan.cores_per_process)
        relays = self._make_relays(share, home)
        self._check_versions(relays)
        nodes = self._nodes(relays, home)
        several = len({node for node, _, _ in nodes}) > 1
        placements = self._placements(nodes, share, cpus, home)
        with _listener(self._plan.size) as (listener, name):
            tokens = [secrets.token_bytes(HANDOVER_BYTES) for _ in nodes]
            started: list[Started] = self._get(
                [
                    relay.start.remote(
                        placement,
                        self._key,
                        self._transport,
                        dict(os.environ),
                        str(pathlib.Path.cwd()),
                        (name, token) if node == home else None,
                    )
                    for (node, _, relay), placement, token in zip(
                        nodes, placements, tokens, strict=True
                    )
                ],
                START_SECONDS,
                "started a worker",
            )
            direct = _receive(
                listener, [t for t, s in zip(tokens, started, strict=True) if s.direct]
            )
        if self._transport == "shm" and not all(s.direct for s in started):
            raise PlacementError(
                "transport='shm' needs all workers on this process's node, with shared memory. "
                f"Received: {sum(not s.direct for s in started)} of {len(started)} workers that "
                "cannot be reached over a Unix socket, as in another container. Use "
                "transport='grpc'."
            )
        payloads = Payloads(ray, sum(not s.direct for s in started))
        for (node, address, relay), placement, token, s in zip(
            nodes, placements, tokens, started, strict=True
        ):
            process = RayProcess(ray, self._session, relay, s.pid)
            worker = RayWorker(placement, process, relay, address if several else "127.0.0.1")
            if s.direct:
                worker.channel, worker.log = direct[token]
            else:
                bridge = Bridge(ray, relay, self._key, payloads, self._ahead(relay))
                worker.cross(bridge, node)
            self.workers.append(worker)

    def close(self) -> None:
        """Ends the actors and gives Ray's CPUs back."""
        if not self._relays or not _is_connected(self._ray, self._session):
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

        if self._transport == "shm":
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
            if isinstance(cause, NanoError):  # its text says what to do
                raise type(cause)(str(cause)) from error
            raise _start_error(error) from error
        except self._ray.exceptions.RayError as error:
            raise _start_error(error) from error

    def _nodes(self, relays: Sequence[Any], home: str) -> list[tuple[str, str, Any]]:
        """Each relay with its node's id and address, by rank: the parent's node comes first."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        ids = self._get([relay.node.remote() for relay in relays], ANSWER_SECONDS, "asked")
        order = sorted(range(len(ids)), key=lambda i: (ids[i] != home, ids[i], i))
        return [(ids[i], addresses[ids[i]], relays[i]) for i in order]

    def _placements(
        self, nodes: Sequence[tuple[str, str, Any]], share: int, cpus: dict[str, int], home: str
    ) -> list[topology.Placement]:
        """The cores of each worker; on each node, one relay plans for all."""
        on = collections.Counter(node for node, _, _ in nodes)
        limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
        first = {node: relay for node, _, relay in reversed(nodes)}
        planned = self._get(
            [
                first[node].plan.remote(
                    count,
                    self._plan.cores_per_process,
                    # Whose rest is too small for a further worker is all theirs.
                    1.0 if (count + 1) * share > cpus[node] else count * share / cpus[node],
                    limits if node == home else {},
                )
                for node, count in on.items()
            ],
            START_SECONDS,
            "planned",
        )
        cores = {node: iter(plan) for node, plan in zip(on, planned, strict=True)}
        return [
            topology.Placement(rank, place.cores, place.numa_node, place.pin)
            for rank, place in enumerate(next(cores[node]) for node, _, _ in nodes)
        ]

    def _ahead(self, relay: Any) -> int:
        """Nanoseconds by which this process's clock is ahead of that of a relay's node."""
        looks: list[tuple[int, int]] = []
        for _ in range(CLOCK_LOOKS):
            before = timing.now()
            there = self._ray.get(relay.clock.remote(), timeout=ANSWER_SECONDS)
            after = timing.now()
            looks.append((after - before, (before + after) // 2 - there))
        return min(looks)[1]


def _start_error(error: BaseException) -> NanoError:
    return NanoError(
        "Every node of the Ray cluster must have nanotf and TensorFlow, in the Python that Ray was "
        f"started with. Received: {type(error).__name__}: {error}"
    )


def _is_connected(ray: Any, session: str) -> bool:
    """Whether Ray is the one that a pool was started with; the user may have shut it down."""
    return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == session)


# ----------------------------------------------------------------------------- the handover
@contextlib.contextmanager
def _listener(size: int) -> Iterator[tuple[socket.socket, str]]:
    """A Unix socket on which relays of this node hand channels over, and its name."""
    with (
        tempfile.TemporaryDirectory(prefix="nanotf-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
    ):
        name = str(pathlib.Path(directory) / "handover")  # nobody else can enter the directory
        sock.bind(name)
        sock.listen(size)
        sock.settimeout(ANSWER_SECONDS)
        yield sock, name


def _receive(
    listener: socket.socket, tokens: Sequence[bytes]
) -> dict[bytes, tuple[Channel, IO[bytes]]]:
    """The channels and logs that relays have sent already, by token."""
    found: dict[bytes, tuple[Channel, IO[bytes]]] = {}
    while len(found) < len(tokens):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            token, fds, _, _ = socket.recv_fds(connection, HANDOVER_BYTES, 2)
        if token not in tokens or len(fds) != 2:
            raise NanoError("Somebody else has connected to the socket of nanotf's Ray workers.")
        for fd in fds:
            os.set_inheritable(fd, False)
        found[token] = Channel(socket.socket(fileno=fds[0])), os.fdopen(fds[1], "w+b")
    return found


# ------------------------------------------------------------------------------ one worker
class RayProcess:
    """What stands for the process of a worker that a relay has started.

    Args:
        ray: the module.
        session: str, the job id of this process's connection to Ray.
        relay: the handle of its `Relay`.
        pid: int.

    Attributes:
        returncode: int or None, as in `subprocess.Popen`; `LOST` for a worker that was lost, which
            ends with its actor.
        lost: str, what Ray says of an actor that has gone; empty if it has not.
    """

    def __init__(self, ray: Any, session: str, relay: Any, pid: int) -> None:
        self._ray, self._session, self._relay = ray, session, relay
        self.pid = pid
        self.returncode: int | None = None
        self.lost = ""
        self._end = relay.wait.options(concurrency_group="life").remote()

    def poll(self) -> int | None:
        """The return code, or None while it runs."""
        return self._look(0)

    def _look(self, seconds: float) -> int | None:
        if self.returncode is not None:
            return self.returncode
        if not _is_connected(self._ray, self._session):
            return self._is_lost("ray.shutdown() was called")
        ready, _ = self._ray.wait([self._end], timeout=seconds)
        if not ready:
            return None
        try:
            found = int(self._ray.get(self._end))
        except self._ray.exceptions.RayError as error:
            return self._is_lost(describe(error))
        self.returncode = found
        return found

    def _is_lost(self, why: str) -> int:
        self.lost, self.returncode = why, LOST
        return LOST

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended. Without a timeout, ends its actor if that takes too long."""
        found = self._look(ANSWER_SECONDS if timeout is None else timeout)
        if found is not None:
            return found
        if timeout is not None:
            raise subprocess.TimeoutExpired("worker", timeout)
        self._ray.kill(self._relay)
        return self._is_lost("it did not answer")

    def kill(self) -> None:
        """Ends it at once."""
        self._tell("kill")

    def send_signal(self, sig: int) -> None:
        """Sends it a signal."""
        self._tell("send_signal", int(sig))

    def _tell(self, method: str, *arguments: Any) -> None:
        if _is_connected(self._ray, self._session):
            tell = getattr(self._relay, method).options(concurrency_group="control")
            tell.remote(*arguments)

    def ask(self, method: str) -> str:
        """What its relay answers; empty where it has gone."""
        if not _is_connected(self._ray, self._session):
            return ""
        asked = getattr(self._relay, method).options(concurrency_group="control").remote()
        try:
            return str(self._ray.get(asked, timeout=ANSWER_SECONDS))
        except (self._ray.exceptions.RayError, TimeoutError):
            return ""


class RayWorker(Worker):
    """A worker that a relay has started.

    Args:
        placement: `topology.Placement`.
        process: `RayProcess`.
        host: str, its node's address.
    """

    process: RayProcess

    def __init__(
        self, placement: topology.Placement, process: RayProcess, relay: Any, host: str
    ) -> None:
        self.rank, self.cores = placement.rank, placement.cores
        self.process, self.host = process, host
        self._bridge: Bridge | None = None
        self._node = ""

    def cross(self, bridge: Bridge, node: str) -> None:
        """Makes this a worker on another node."""
        self._bridge, self._node = bridge, node
        self.channel, self.shares_memory = bridge.channel, False

    def log_tail(self) -> str:
        return super().log_tail() if self._bridge is None else self.process.ask("log_tail")

    def stack(self) -> str:
        if self._bridge is None:
            return super().stack()
        return self.process.ask("stack") or "its node does not answer"

    def is_stopped(self) -> bool:
        if self._bridge is None:
            return stalls.is_stopped(self.process.pid)
        return self._bridge.stopped

    def has_answered(self, since: float) -> bool:
        return self._bridge is None or self._bridge.heard > since

    def where(self) -> str:
        node = f" on node {self.host}" if self._bridge is not None else ""
        return super().where() + node

    def how_it_ended(self) -> tuple[str, int | None, int | None]:
        lost = self.process.lost or (self._bridge.lost if self._bridge is not None else "")
        if lost:
            return f"was lost with its Ray actor ({lost})", None, None
        if self._bridge is not None and self.process.returncode is None:
            return "was lost: its node does not answer", None, None
        return describe_exit(self.process.returncode)

    def close(self) -> None:
        self.channel.close()
        if self._bridge is None:
            self.log.close()
        else:
            self._bridge.close()
