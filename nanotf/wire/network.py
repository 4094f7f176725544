"""TCP connections between the hosts of a run.

A listener binds the address of one interface, never all. Both ends of each connection prove that
they know the run's secret before either unpickles anything, in the manner of `channel` (an HMAC
challenge in both directions). Before that, both name their run, so that a port of another run, or
of another program, is not taken for one whose secret differs. Contents are not encrypted: other
hosts must not be able to change the traffic, as on the private network of a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import ProcessError
from typing import Any

from nanotf.console import logger
from nanotf.wire.channel import NO_DESCRIPTORS, Channel, ChannelClosed
from nanotf.wire.messages import Message

HANDSHAKE_SECONDS = 10.0  # for all that a peer says before it is let in
GUESTS = 64  # that have not said who they are
LOG_SECONDS = 60.0  # between lines of the log about strangers
POLL_SECONDS = 0.2  # between looks at the guests' deadlines and at `close`
END_SECONDS = 5.0  # for the accepting thread
RETRY_SECONDS = 0.5  # between attempts to connect
ATTEMPT_SECONDS = 5.0  # to connect to one of several ports
_PORTS, _FIRST_PORT, _LAST_PORT = 4, 20000, 32000  # below those that systems give to connections
_GREETING = 16  # bytes that name a run
# The kernel closes a connection to a host that has lost power: seconds until the first probe,
# between probes, their number, and the age of data that were sent and not acknowledged.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4))
_UNACKNOWLEDGED_MS = 20_000


class Unreachable(OSError):
    """A host did not answer before the deadline. The text gives the last reason."""


class WrongSecret(PermissionError):
    """The other end belongs to the same run, and does not know its secret."""


class OtherRun(ConnectionError):
    """The other end belongs to another run, or is no nanotf."""


def ports_of(run: str) -> tuple[int, ...]:
    """Returns the ports on which the first host of a run may listen, the first choice first.

    Args:
        run: names the run on all of its hosts.
    """
    digests = (hashlib.sha256(f"{number} {run}".encode()).digest() for number in range(_PORTS))
    numbers = (int.from_bytes(digest[:8], "big") for digest in digests)
    return tuple(_FIRST_PORT + number % (_LAST_PORT - _FIRST_PORT) for number in numbers)


def address_of(name: str, others: tuple[str, ...]) -> str:
    """Returns the address of this host at which the other hosts reach it.

    Args:
        name: a name or address of this host.
        others: names or addresses of the other hosts.

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
        address: of an interface of this host.
        port: 0 chooses a free one.

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


def listen_on_one(address: str, ports: Sequence[int]) -> socket.socket:
    """Returns a socket that listens on the first of some ports that is free, as `listen` does."""
    for port in ports[:-1]:
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return listen(address, ports[-1])


def connect(
    host: str,
    ports: Sequence[int],
    secret: bytes,
    deadline: float,
    waits: Callable[[], None] = lambda: None,
    run: str = "",
) -> Channel:
    """Connects to a host that may not have started, or whose name may not resolve, yet.

    Args:
        host: name or address.
        ports: it listens on one of them; others may be those of other runs.
        deadline: by `time.monotonic`.
        waits: called before each new attempt.
        run: names the run on all of its hosts.

    Raises:
        Unreachable: It did not answer before the deadline.
        WrongSecret: It answered, but does not know the secret.
    """
    while True:
        failed: OSError | None = None
        for port in ports:
            left = max(0.1, deadline - time.monotonic())
            left = left if len(ports) == 1 else min(left, ATTEMPT_SECONDS)
            try:
                sock = socket.create_connection((host, port), left)
                return _prove(sock, secret, run, first=False)
            except WrongSecret:  # an OSError, too, but another attempt would get the same answer
                raise
            except OSError as error:  # it may be there, and have no room for a connection now
                failed = failed or error
        if time.monotonic() + RETRY_SECONDS > deadline:
            raise Unreachable(f"{type(failed).__name__}: {failed}") from failed
        waits()
        time.sleep(RETRY_SECONDS)


def accept(sock: socket.socket, secret: bytes, run: str = "") -> Channel:
    """Returns the channel of a connection that a listener has accepted.

    Args:
        sock: owned by the channel from now on.
        run: as for `connect`.

    Raises:
        WrongSecret: The other end belongs to the run, and does not know its secret.
        OSError: It has gone, says nothing, or is another one.
    """
    return _prove(sock, secret, run, first=True)


def _name_run(sock: socket.socket, run: str) -> None:
    """Names the run to the other end, which does the same. Raises `OSError` if it does not."""
    own = hashlib.sha256(f"nanotf {run}".encode()).digest()[:_GREETING]
    sock.settimeout(HANDSHAKE_SECONDS)
    sock.sendall(own)
    theirs = b""
    while len(theirs) < _GREETING:
        part = sock.recv(_GREETING - len(theirs))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        theirs += part
    if theirs != own:
        raise OtherRun("another run, or another program, uses this port")
    sock.setblocking(True)  # with a timeout its descriptor does not block, as `Channel` needs it to


def _prove(sock: socket.socket, secret: bytes, run: str, *, first: bool) -> Channel:
    try:
        _watch(sock)
        _name_run(sock, run)
    except OtherRun:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    channel = Channel(sock)
    try:
        channel.limit(HANDSHAKE_SECONDS)
        (channel.show_key_first if first else channel.show_key_second)(secret)
        channel.limit(0)
    except (OSError, EOFError) as error:
        channel.close()
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    except (ValueError, AssertionError, ProcessError) as error:
        channel.close()  # the other end may be anything, and answer anything
        raise WrongSecret(f"{type(error).__name__}: {error}") from error
    return channel


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection before its first message."""

    sock: socket.socket
    address: str
    deadline: float  # by `time.monotonic`, for its first message


class Gate:
    """Lets those in who know the run's secret, whoever else connects to a listener.

    A thread accepts; each guest has a thread, and `HANDSHAKE_SECONDS` in all until its first
    message has come. There are at most `GUESTS`: the oldest must go when another comes, or when
    this process has no descriptors left. The others are counted in one line of the log a minute.

    Args:
        listener: owned from now on.
        admit: called with a guest's first message and its channel, which it then owns, in the
            guest's thread, which may wait.
        refuse: called with the reason why somebody was sent away.
        run: as for `connect`.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        admit: Callable[[Any, Channel], None],
        refuse: Callable[[str], None] = lambda _: None,
        run: str = "",
    ) -> None:
        self._run = run
        self._listener, self._secret, self._admit, self._refuse = listener, secret, admit, refuse
        self._lock = threading.Lock()  # guards the rest
        self._guests: list[_Guest] = []  # the oldest first
        self._unknown: list[str] = []  # addresses that have not been logged
        self._logged = -math.inf
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="nanotf-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the listener; guests are sent away."""
        with self._lock:
            self._closed = True
            while self._guests:
                _send_away(self._guests.pop(0))
        self._thread.join(END_SECONDS)
        self._listener.close()  # not before, since the thread polls its descriptor

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closed:
            is_there = poll.poll(POLL_SECONDS * 1000)
            self._look_at_clock()
            if is_there:
                self._let_in()

    def _let_in(self) -> None:
        try:
            sock, (address, *_) = self._listener.accept()
        except OSError as error:  # also of a guest that has gone already
            if error.errno in (*NO_DESCRIPTORS, errno.ENOBUFS, errno.ENOMEM):
                with self._lock:
                    self._make_room(0)
                time.sleep(POLL_SECONDS)  # until the guests' threads have closed theirs
            return
        guest = _Guest(sock, address, time.monotonic() + HANDSHAKE_SECONDS)
        with self._lock:
            if self._closed:  # since the connection was accepted
                sock.close()
                return
            self._make_room(GUESTS - 1)
            self._guests.append(guest)
        thread = threading.Thread(
            target=self._greet, args=(guest,), name="nanotf-guest", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system allows no further thread
            self._leave(guest)
            sock.close()

    def _make_room(self, most: int) -> None:
        """Sends the oldest guests away; called with the lock held."""
        while len(self._guests) > most:
            _send_away(self._guests.pop(0))

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        with self._lock:
            while self._guests and self._guests[0].deadline < now:
                _send_away(self._guests.pop(0))
            if not self._unknown or now - self._logged < LOG_SECONDS:
                return
            found, self._unknown, self._logged = self._unknown, [], now
        logger.warning(
            "%d connection%s without this run's secret %s closed, the last from %s.",
            len(found),
            "s" * (len(found) > 1),
            "were" if len(found) > 1 else "was",
            found[-1],
        )

    def _leave(self, guest: _Guest) -> None:
        with self._lock:
            if guest in self._guests:
                self._guests.remove(guest)

    def _greet(self, guest: _Guest) -> None:
        channel: Channel | None = None
        try:
            channel = accept(guest.sock, self._secret, self._run)
            # For each read; `_look_at_clock` holds the guest to its deadline for all of them.
            channel.limit(HANDSHAKE_SECONDS)
            message = channel.receive()
            channel.limit(0)
        except (OSError, EOFError) as error:
            self._leave(guest)
            if channel is not None:
                channel.close()
            self._note(guest.address, error)
            return
        self._leave(guest)
        self._admit(message, channel)

    def _note(self, address: str, error: Exception) -> None:
        with self._lock:
            if self._closed:
                return
            self._unknown.append(address)
        why = "has not said who it is"
        if isinstance(error, WrongSecret):
            why = "does not know this run's secret"
        elif isinstance(error, OtherRun):
            why = "belongs to another run, or is no nanotf"
        self._refuse(f"A process on {address} {why}.")


def _send_away(guest: _Guest) -> None:
    # Its thread, which waits for a word of it, notices and closes the descriptor.
    with contextlib.suppress(OSError):
        guest.sock.shutdown(socket.SHUT_RDWR)


def _watch(sock: socket.socket) -> None:
    """Makes the kernel notice a peer that is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def introduce(host: str, port: int, secret: bytes, deadline: float, message: Message) -> int:
    """Connects to another host as `connect` does, and sends it a first message.

    Returns:
        The descriptor of the connection; the caller owns it.

    Raises:
        Unreachable, WrongSecret: As `connect`.
    """
    while True:
        channel = connect(host, (port,), secret, deadline)
        try:
            channel.send(message)
            return hand_over(channel)
        except ChannelClosed as error:  # it had no room for another connection, or has ended
            channel.close()
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise Unreachable(str(error)) from error
        time.sleep(RETRY_SECONDS)


def hand_over(channel: Channel) -> int:
    """Returns the descriptor of a channel's connection, and closes the channel."""
    fd = os.dup(channel.fileno())
    channel.close()
    return fd
