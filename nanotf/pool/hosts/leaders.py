"""The connections between the leaders of hosts, on which the collectives of a pool exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from nanotf.collectives import HostsSpec
from nanotf.errors import NanoError
from nanotf.pool.hosts import agent_messages
from nanotf.wire import network

CONNECT_SECONDS = 60.0  # for the other hosts to start their part of a pool

# Takes a pool, a host's index, its name and a deadline. Returns the descriptor of the connection
# that this host has opened.
Accepted = Callable[[int, int, str, float], int]


def connected(
    pool: int,
    hosts: HostsSpec,
    addresses: Sequence[tuple[str, int]],
    secret: bytes,
    accepted: Accepted,
) -> Iterator[int]:
    """Yields the descriptor of a connection to each other host, in their order.

    Of two hosts, the earlier one opens the connection.

    Args:
        pool: its number.
        addresses: of the listeners, by host; the first one's is not used.
        secret: the run's.
        accepted: see `Accepted`; the first host calls it for none.

    Raises:
        NanoError: Another host cannot be reached.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    for host, name in enumerate(hosts.names):
        if host < hosts.index:
            yield accepted(pool, host, name, deadline)
        elif host > hosts.index:
            where, port = addresses[host]
            try:
                leader = agent_messages.Leader(pool, hosts.index)
                yield network.introduce(where, port, secret, deadline, leader)
            except (network.Unreachable, network.WrongSecret) as error:
                raise NanoError(
                    "The hosts of a run must reach each other. Received: host "
                    f"{hosts.names[hosts.index]} does not reach {name}, {where} port {port}: "
                    f"{error}."
                ) from error


def none_accepted(pool: int, host: int, name: str, deadline: float) -> int:
    """Stands for `Accepted` on the first host, which opens all of its connections."""
    raise AssertionError(f"the first host waits for no leader, but for {name}")
