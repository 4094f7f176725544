"""TCP connections between the hosts of a run.

A listener binds the address of one interface, never all. Both ends of each connection prove that
they know the run's secret before either unpickles anything, in the manner of `channel` (an HMAC
challenge in both directions). Contents are not encrypted: other hosts must not be able to change
the traffic, as on the private network of a cluster.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from multiprocessing import ProcessError

from nanotf.wire.channel import Channel

HANDSHAKE_SECONDS = 10.0  # for a peer that connects and then says nothing
RETRY_SECONDS = 0.5
# The kernel closes a connection to a host that has lost power: seconds until the first probe,
# between probes, their number, and the age of data that were sent and not acknowledged.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4))
_UNACKNOWLEDGED_MS = 20_000


class Unreachable(OSError):
    """A host did not answer before the deadline. The text gives the last reason."""


class WrongSecret(PermissionError):
    """The other end does not know the run's secret, or is no nanotf."""


def address_of(name: str, others: tuple[str, ...]) -> str:
    """Returns the address of this host at which the other hosts reach it.

    Args:
        name: str, a name or address of this host.
        others: tuple of str, names or addresses of the other hosts.

    Raises:
        OSError: The name does not resolve.
    """
    own = socket.gethostbyname(name)
    for other in others:
        try:
            there = socket.gethostbyname(other)
        except OSError:
            continue  # it may not have started yet
        if is_loopback(own) and not is_loopback(there):
            # Debian's /etc/hosts gives a host's own name an address that only it can reach.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect((there, 9))  # sends nothing, but chooses the route
                return str(sock.getsockname()[0])
    return own


def is_loopback(address: str) -> bool:
    """Returns True if only this machine can reach an IPv4 address."""
    return address.startswith("127.")


def address_of_interface(name: str) -> str | None:
    """Returns the IPv4 address of a network interface such as "eth0", or None."""
    import psutil

    entries = psutil.net_if_addrs().get(name, ())
    return next((entry.address for entry in entries if entry.family == socket.AF_INET), None)


def listen(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens on one address.

    Args:
        address: str, of an interface of this host.
        port: int; 0 chooses a free one.

    Raises:
        OSError: The address is not this host's, or the port is taken.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A run that starts soon after another may use its port. Two at a time cannot.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(
    host: str, port: int, secret: bytes, deadline: float, waits: Callable[[], None] = lambda: None
) -> Channel:
    """Connects to a host that may not have started, or whose name may not resolve, yet.

    Args:
        host: str, name or address.
        port: int.
        secret: bytes.
        deadline: float, by `time.monotonic`.
        waits: called before each new attempt.

    Raises:
        Unreachable: It did not answer before the deadline.
        WrongSecret: It answered, but does not know the secret.
    """
    while True:
        try:
            sock = socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise Unreachable(f"{type(error).__name__}: {error}") from error
        waits()
        time.sleep(RETRY_SECONDS)
    return _prove(sock, secret, first=False)


def accept(sock: socket.socket, secret: bytes) -> Channel:
    """Returns the channel of a connection that a listener has accepted.

    Args:
        sock: `socket.socket`, owned from now on.
        secret: bytes.

    Raises:
        WrongSecret: The other end does not know the secret.
    """
    return _prove(sock, secret, first=True)


def _prove(sock: socket.socket, secret: bytes, *, first: bool) -> Channel:
    _watch(sock)
    sock.setblocking(True)
    channel = Channel(sock)
    try:
        channel.limit(HANDSHAKE_SECONDS)
        (channel.show_key_first if first else channel.show_key_second)(secret)
        channel.limit(0)
    except (OSError, EOFError, ValueError, AssertionError, ProcessError) as error:
        channel.close()  # the other end may be anything, and answer anything
        raise WrongSecret(f"{type(error).__name__}: {error}") from error
    return channel


def _watch(sock: socket.socket) -> None:
    """Makes the kernel notice a peer that is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def hand_over(channel: Channel) -> int:
    """Returns the descriptor of a channel's connection, and closes the channel."""
    fd = os.dup(channel.fileno())
    channel.close()
    return fd
