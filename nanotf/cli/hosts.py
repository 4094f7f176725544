"""`nanotf run` on several hosts: the first runs the script, the others lend it their workers.

Environment variables read: NANOTF_PORT (the TCP port of the first host; default: one that the
launcher's name for the run chooses, and 18891 if nothing names the run), NANOTF_INTERFACE (the
network interface that hosts use, such as "eth0"; default: the address in NANOTF_HOST_ADDRESSES,
else SM_NETWORK_INTERFACE_NAME, else the address of this host's name, else the route to the others),
NANOTF_SECRET (see `pool.hosts.secret`), NANOTF_JOIN_SECONDS, NANOTF_OWN_EXIT_CODE (if it is set, a
host that has lent its workers ends with 0 rather than with the script's exit code), and those of
`machine.cluster` and `machine.launcher_binding`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nanotf.console import status
from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.machine import cluster, launcher_binding, topology
from nanotf.machine.cluster import Cluster
from nanotf.machine.own_exit import at_own_exit

if TYPE_CHECKING:
    from nanotf.pool.hosts.agent import LentProcesses
    from nanotf.pool.hosts.members import Hosts

PORT_VARIABLE = "NANOTF_PORT"
PORT = 18891
_TELL_SECONDS = 30.0  # for other hosts to hear that the run cannot begin
INTERFACE_VARIABLE = "NANOTF_INTERFACE"

# Of the script, for the other hosts; 1 until it has ended by itself. Empty if there are none.
_codes: collections.deque[int] = collections.deque(maxlen=1)


def wait_for_all(hosts: Hosts) -> None:
    """Waits for the other hosts. Raises `NanoError` if some do not come."""
    from nanotf.pool.hosts import members

    found = hosts.cluster
    others = found.hosts[1:] or ("the other processes of the launcher",)
    if found.size > 1 or sum(found.launched) > 1:
        with status(f"waiting for {', '.join(others)} (hosts from {found.source})"):
            seconds = members.join_seconds()
            until = time.monotonic() + seconds
            try:
                hosts.wait_for_all(seconds)
            except NanoError as error:
                # 0 after a timeout. After a host has declined, others may still be on their way.
                left = max(0.0, until - time.monotonic())
                hosts.give_up(str(error), min(left, _TELL_SECONDS))
                raise


def enter(
    flag: str | None,
    count: Callable[[Cluster], int],
    environ: Mapping[str, str],
    check: Callable[[], None],
    lend_for: Callable[..., LentProcesses] | None = None,
) -> Hosts | int | None:
    """Finds the hosts of a run, and joins them.

    Args:
        flag: the value of `--hosts`, or None to look at the environment.
        count: returns the number of workers, or of ranks, of this host.
        environ: this process's environment variables.
        check: raises if the script cannot run; called in the process that is to run it.
        lend_for: what another host lends, see `Agent`; None for workers.

    Returns:
        The hosts if this is the first of several; None if it is the only one; otherwise the
        exit code of the script, which has run on the first host meanwhile, or that of a process of
        this host whose failure has ended it.

    Raises:
        NanoError: The hosts are described wrongly, or this one cannot join them.
    """
    binding = launcher_binding.undo(environ)  # before cores are counted
    with launcher_binding.named(binding):
        return _enter(cluster.find(environ, flag), count, environ, check, lend_for)


def _enter(
    found: Cluster,
    count: Callable[[Cluster], int],
    environ: Mapping[str, str],
    check: Callable[[], None],
    lend_for: Callable[..., LentProcesses] | None,
) -> Hosts | int | None:
    cluster.choose(found)
    # A launcher that starts several processes on a host expects all of them to stay.
    has_siblings = found.source != "--hosts" and (found.workers[found.rank] or 1) > 1
    is_first = (found.rank, found.local_rank) == (0, 0)
    if found.size == 1 and not has_siblings:
        if is_first:
            check()
        return None
    from nanotf.pool.hosts.agent import Agent
    from nanotf.pool.hosts.secret import secret_of

    secret, ports = secret_of(environ), _ports(found, environ)
    address = _address(found, environ)
    to_first = (cluster.address_of(found.hosts[0], environ), ports)
    try:
        if is_first:
            check()
        # One process of a host lends all of its workers; the others only wait for the end.
        own = count(found) if found.local_rank == 0 else 0
        if own:
            topology.plan(own)  # raises if this host has too few cores
    except NanoError as error:
        with status("telling the other hosts that this one cannot take part"):
            if is_first:
                # Listens only to tell those that come.
                _open(found, 0, secret, address, ports).give_up(str(error), _TELL_SECONDS)
            else:
                Agent(found, 0, secret, address, to_first).decline(str(error), _TELL_SECONDS)
        raise
    if is_first:
        return _open(found, own, secret, address, ports)
    if lend_for is None:
        agent = Agent(found, own, secret, address, to_first)
    else:
        agent = Agent(found, own, secret, address, to_first, lend_for=lend_for, what="rank")
    code = agent.run()
    # A host whose own process has failed reports that, even where others end with 0.
    return (agent.failed_code if code else 0) or own_code(code, environ)


def own_code(code: int, environ: Mapping[str, str]) -> int:
    """Returns the exit code of a host that ends since another one has.

    Args:
        code: that of the other one.
        environ: this process's environment variables.
    """
    return 0 if environ.get(cluster.OWN_CODE_VARIABLE) else code


def _open(found: Cluster, workers: int, secret: bytes, address: str, ports: Sequence[int]) -> Hosts:
    from nanotf.pool.hosts import members

    try:
        hosts = members.Hosts(found, workers, secret, address, ports)
    except OSError as error:
        raise InvalidArgumentError(
            "The first host listens on one address and port. Received: "
            f"{address} port {', '.join(map(str, ports))}: {error.strerror}. Set "
            f"{PORT_VARIABLE} to a free port on all hosts, or {INTERFACE_VARIABLE} to the name of "
            "this host's network interface."
        ) from error
    members.current = hosts
    _codes.append(1)
    # Registered before the pool's, so that it runs after workers have ended.
    at_own_exit(lambda: hosts.dismiss(_codes[-1]))
    return hosts


def are_several() -> bool:
    """Returns True if this process runs the script for several hosts."""
    return bool(_codes)


def end(code: int) -> None:
    """Records the exit code of the script, which the other hosts get when this process exits."""
    if _codes:
        _codes.append(code)


def workers(found: Cluster, asked: int | str | None) -> int:
    """Returns the number of workers of this host.

    Args:
        asked: the number if the source of the hosts gives none; "auto" or None for one per
            `topology.CORES_PER_PROCESS` cores.
    """
    given = found.workers[found.rank]
    if given is None and isinstance(asked, int):
        given = asked
    if given is None:
        given = topology.default_count()
    return given


def _ports(found: Cluster, environ: Mapping[str, str]) -> Sequence[int]:
    """Returns the ports on one of which the first host listens; all hosts find the same ones."""
    text = environ.get(PORT_VARIABLE)
    if text is None:
        from nanotf.wire import network

        # Without a name of the run, hosts could not tell it from another one on a second port.
        return network.ports_of(found.run) if found.run else (PORT,)
    # Not 0, any free port: the other hosts could not know it.
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise InvalidArgumentError(
            f"{PORT_VARIABLE} must be a TCP port, 1 to 65535. Received: {PORT_VARIABLE}={text!r}."
        )
    return (int(text),)


def _address(found: Cluster, environ: Mapping[str, str]) -> str:
    from nanotf.wire import network

    interface = environ.get(INTERFACE_VARIABLE)
    if interface:
        address = network.address_of_interface(interface)
        if address is None:
            raise InvalidArgumentError(
                f"{INTERFACE_VARIABLE} must name a network interface with an IPv4 address. "
                f"Received: {INTERFACE_VARIABLE}={interface!r}. `ip -br address` lists them."
            )
        return address
    # An address in NANOTF_HOST_ADDRESSES goes before that of the platform's interface.
    is_named = cluster.address_of(found.current, environ) != found.current
    # The user has not chosen this one: without an address, it is passed over.
    platforms = environ.get("SM_NETWORK_INTERFACE_NAME")
    address = network.address_of_interface(platforms) if platforms and not is_named else None
    if address is not None:
        return address
    names = tuple(cluster.address_of(host, environ) for host in found.hosts)
    others = names[: found.rank] + names[found.rank + 1 :]
    try:
        return network.address_of(names[found.rank], others)
    except OSError as error:
        raise InvalidArgumentError(
            f"This host's name must resolve to an address. Received: {found.current}: {error}. "
            f"Set {INTERFACE_VARIABLE} to the name of its network interface, or "
            f"{cluster.ADDRESSES_VARIABLE} to NAME=ADDRESS,NAME=ADDRESS."
        ) from error
