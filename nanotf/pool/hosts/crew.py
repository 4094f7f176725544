"""Starts a pool's workers on this host and on the others that have joined."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from nanotf.collectives import HostsSpec
from nanotf.errors import InvalidArgumentError
from nanotf.machine import neighbours
from nanotf.pool import stalls
from nanotf.pool.handles import Worker
from nanotf.pool.handshake import START_SECONDS
from nanotf.pool.hosts import agent_messages, leaders
from nanotf.pool.hosts.bridge import ANSWER_SECONDS, Bridge
from nanotf.pool.hosts.members import Hosts, Member
from nanotf.pool.hosts.remote import taken_over
from nanotf.pool.local import LocalCrew
from nanotf.pool.plans import HostsPlan
from nanotf.wire import timing

CLOCK_LOOKS = 5  # the fastest of this many answers tells a host's time most precisely
# A host's own group waits longer than hosts wait for each other, see `HostsSpec`.
MARGIN_SECONDS = 10.0


class HostsCrew:
    """Workers on this host and on others.

    Args:
        hosts: owned by the caller, for this pool and later ones.
        transport: "shm", within each host.
        key: the pool's secret key.

    Raises:
        PlacementError: This host has too few cores.
        InvalidArgumentError: Hosts do not have this transport.

    Attributes:
        here: `topology.Plan` of this host.
        hosts: `HostsSpec`, or None if all workers are on this host.
    """

    def __init__(self, hosts: Hosts, plan: HostsPlan, transport: str, key: bytes) -> None:
        check_between_hosts(transport)
        self._all = hosts
        self._key, self._cores = key, plan.cores_per_process
        others = self._all.members()
        counts = counts_of(plan.size, [self._all.workers, *(m.workers for m in others)])
        self.here = neighbours.plan(counts[0], plan.cores_per_process, part=hosts.part)
        self._others = [member for member, count in zip(others, counts[1:], strict=True) if count]
        self.hosts: HostsSpec | None = None
        if self._others:
            names = (self._all.cluster.current, *(member.name for member in self._others))
            used = tuple(count for count in counts if count)
            self.hosts = HostsSpec(0, used, names, stalls.stall_seconds())
        self.deadline = stalls.stall_seconds() + (MARGIN_SECONDS if self.hosts else 0.0)
        self._local = LocalCrew(self.here, transport, key)
        self.workers: list[Worker] = self._local.workers  # the others' follow
        self._pool = self._all.next_pool()
        self._connections: list[int] = []

    def start(self) -> None:
        """Starts the workers.

        Raises:
            NanoError: A host could not start its workers, or is gone.
        """
        bridges = [self._lend(index, member) for index, member in enumerate(self._others, 1)]
        self._connect()  # hosts wait for this connection before they start their workers
        self._local.start()  # meanwhile the others start theirs
        for member, bridge in zip(self._others, bridges, strict=True):
            lent = member.lent(self._pool, START_SECONDS)
            bridge.ahead = _ahead(member)
            self.workers += [bridge.worker(*worker) for worker in lent.workers]

    def _lend(self, index: int, member: Member) -> Bridge:
        assert self.hosts is not None, "there are others"
        bridge = Bridge(member, self._pool, self.hosts.ranks(index), self._key)
        order = agent_messages.Lend(
            self._pool,
            dataclasses.replace(self.hosts, index=index),
            self._addresses(),
            self._cores,
            self._key,
            taken_over(os.environ),
            self.deadline,
        )
        member.lend(order, bridge)
        return bridge

    def _connect(self) -> None:
        """Connects this host's first worker to those of the others."""
        if self.hosts is not None:
            where = self._addresses()
            for fd in leaders.connected(
                self._pool, self.hosts, where, self._all.secret, leaders.none_accepted
            ):
                self._connections.append(fd)

    def _addresses(self) -> tuple[tuple[str, int], ...]:
        return (self._all.address, *(other.address for other in self._others))

    def take_connections(self, rank: int) -> list[int]:
        """Returns the descriptors that a worker's setup needs; the caller closes them."""
        if rank != 0:
            return []
        taken, self._connections = self._connections, []
        return taken

    def close(self) -> None:
        """Takes the workers of the other hosts back."""
        for fd in self.take_connections(0):
            os.close(fd)
        for member in self._others:
            member.take_back(self._pool)
        self._local.close()


def check_between_hosts(transport: str) -> None:
    """Raises `InvalidArgumentError` if workers on several hosts cannot use a transport."""
    if transport == "grpc":
        raise InvalidArgumentError(
            "Workers on several hosts exchange gradients through nanotf's own connections. "
            "Received: transport='grpc'. Leave the argument out."
        )


def counts_of(size: int, workers: Sequence[int]) -> list[int]:
    """Returns the number of a pool's workers on each host.

    Fills the hosts in order. If a host was lost, the rest get the workers that no longer fit, one
    each in turn.

    Args:
        size: number of the pool's workers.
        workers: the number that each host lends, at least 1 on the first.

    Example:
        >>> counts_of(6, [4, 4]), counts_of(9, [4, 2])
        ([4, 2], [6, 3])
    """
    counts: list[int] = []
    for most in workers:
        counts.append(min(most, size - sum(counts)))
    for extra in range(size - sum(counts)):
        counts[extra % len(counts)] += 1
    return counts


def _ahead(member: Member) -> int:
    """Returns the nanoseconds by which this process's clock is ahead of a host's clock."""
    looks: list[tuple[int, int]] = []
    for _ in range(CLOCK_LOOKS):
        before = timing.now()
        there = member.ask("clock", ANSWER_SECONDS)
        after = timing.now()
        if there is not None:
            looks.append((after - before, (before + after) // 2 - int(there)))
    return min(looks)[1] if looks else 0
