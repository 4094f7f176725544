"""The first host's view of the others: who has joined, and the connection to each."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from nanotf.console import logger
from nanotf.errors import NanoError
from nanotf.machine.cluster import Cluster
from nanotf.pool import settings
from nanotf.pool.hosts import agent_messages
from nanotf.pool.hosts.remote import Said
from nanotf.pool.supervision import SILENT_SECONDS
from nanotf.wire import network
from nanotf.wire.channel import Channel, ChannelClosed

JOIN_VARIABLE = "NANOTF_JOIN_SECONDS"
_REFUSED_KEPT = 20  # different reasons; anyone who reaches the port can add some
JOIN_SECONDS = 300.0  # container images and queues start hosts minutes apart


def join_seconds() -> float:
    """Returns how long hosts wait for each other: NANOTF_JOIN_SECONDS, default 300 s.

    Raises:
        NanoError: The variable is not a number above 0.
    """
    return settings.seconds(JOIN_VARIABLE, JOIN_SECONDS)


class Listener(Protocol):
    """The user of a member's workers: the bridge of a pool."""

    pool: int

    def said(self, rank: int, said: Said) -> None:
        """Takes a worker's message."""

    def ended(self, rank: int, code: int) -> None:
        """Takes a worker's exit code."""

    def host_lost(self) -> None:
        """Records that the host is gone."""


class Member:
    """Another host that has joined.

    Args:
        channel: owned from now on.

    Attributes:
        lost: str, why it is gone; empty while it is connected.
        heard: float, the time of its last message, by `time.monotonic`.
        stopped: tuple of int, the ranks that a signal has stopped.
    """

    def __init__(self, join: agent_messages.Join, channel: Channel) -> None:
        self.name, self.index, self.workers = join.name, join.host, join.workers
        self.address = join.address
        self.lost, self.heard = "", time.monotonic()
        self.stopped: tuple[int, ...] = ()
        self._channel = channel
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener: Listener | None = None
        threading.Thread(target=self._read, name=f"nanotf-{join.name}", daemon=True).start()

    def answers(self) -> bool:
        """Returns True unless it is lost, or silent for so long that it is about to be."""
        return not self.lost and time.monotonic() - self.heard < SILENT_SECONDS

    def replace(self) -> None:
        """Ends this connection, since the host has made another one."""
        self.lost = self.lost or "it has started again"
        self._channel.shut_down()

    def send(self, message: Any, *contents: Any) -> None:
        """Sends a message and bytes that follow it. A host that is gone gets nothing."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send_with(message, *contents)

    def lend(self, order: agent_messages.Lend, listener: Listener) -> None:
        """Asks for the workers of a pool; `lent` waits for them."""
        self._listener = listener
        while not self._replies.empty():  # of a pool that failed to start
            self._replies.get()
        self.send(order)

    def lent(self, pool: int, seconds: float) -> agent_messages.Lent:
        """Waits for the workers of a pool.

        Raises:
            NanoError: The host could not start them, is gone, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                reply = self._replies.get(timeout=0.5)
            except queue.Empty:
                if self.lost:
                    raise NanoError(f"Host {self.name} was lost: {self.lost}.") from None
                continue
            if reply.pool == pool and isinstance(reply, agent_messages.Lent):
                return reply
            if reply.pool == pool:
                raise NanoError(f"Host {self.name} could not start its workers: {reply.text}")
        raise NanoError(f"Host {self.name} did not start its workers within {seconds:.0f} s.")

    def take_back(self, pool: int) -> None:
        """Ends a pool's workers there."""
        self._listener = None
        self.send(agent_messages.TakeBack(pool))

    def ask(self, question: str, seconds: float, pool: int = -1, rank: int = -1) -> Any:
        """Returns the host's answer; None if it is gone or does not answer in time."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        try:
            self.send(agent_messages.Ask(number, question, pool, rank))
            deadline = time.monotonic() + seconds
            while not self.lost and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    return answer.get(timeout=0.2)
            return None
        finally:
            del self._answers[number]

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
                self.heard = time.monotonic()
        except ChannelClosed as error:
            self.lost = self.lost or str(error) or "its connection has ended"
        except Exception as error:  # no memory, for example: the stream cannot be resumed
            self.lost = f"{type(error).__name__}: {error}"
            logger.warning("Host %s is lost.", self.name, exc_info=error)
        self._channel.shut_down()
        listener = self._listener
        if listener is not None:
            listener.host_lost()

    def _handle(self, message: Any) -> None:
        if isinstance(message, agent_messages.Beat):
            self.stopped = message.stopped
        elif isinstance(message, agent_messages.Answer):
            waiting = self._answers.get(message.number)
            if waiting is not None:
                waiting.put(message.value)
        elif isinstance(message, (agent_messages.Lent, agent_messages.NotLent)):
            self._replies.put(message)
        elif isinstance(message, agent_messages.FromWorker):
            said = self._contents(message)  # also those that nobody takes: they are in the stream
            listener = self._listener  # read once: another thread may clear it
            if listener is not None and listener.pool == message.pool:
                listener.said(message.rank, said)
        elif isinstance(message, agent_messages.WorkerEnded):
            listener = self._listener
            if listener is not None and listener.pool == message.pool:
                listener.ended(message.rank, message.code)

    def _contents(self, message: agent_messages.FromWorker) -> Said:
        import numpy as np  # the front of a server imports this module, and has no arrays

        def receive(nbytes: int) -> Any:
            content = np.empty(nbytes, np.uint8)
            self._channel.receive_into(content.data)
            return content

        written = tuple((key, offset, receive(n)) for key, offset, n in message.written)
        block = None if message.block is None else receive(message.block)
        return Said(message.body, written, block)

    def dismiss(self, bye: agent_messages.Bye) -> None:
        """Tells it that the script has ended, and closes the connection."""
        self._listener = None
        self.lost = self.lost or "the script has ended"
        self.send(bye)
        self._channel.shut_down()


class Hosts:
    """All hosts, on the first one. Creating this object opens the listener.

    Args:
        workers: the number of workers on this host.
        secret: all hosts'.
        address: the one to listen on.
        ports: it listens on the first of them that is free.
        part: see `neighbours.plan`.

    Raises:
        OSError: The ports are taken, or the address is not this host's.
    """

    def __init__(
        self,
        cluster: Cluster,
        workers: int,
        secret: bytes,
        address: str,
        ports: Sequence[int],
        part: float = 1.0,
    ) -> None:
        self.cluster, self.workers, self.secret, self.part = cluster, workers, secret, part
        self._pools = itertools.count(1)
        self._changed = threading.Condition()
        # Guarded by `_changed`.
        self._members: dict[int, Member] = {}  # by host
        self._waiting: list[tuple[int, Channel]] = []  # hosts of processes that lend nothing
        self._refused: collections.Counter[str] = collections.Counter()
        self._declined = ""  # why the run cannot begin with a process that has come
        self._bye: agent_messages.Bye | None = None  # once the script has ended, or cannot begin
        self._came = 0  # processes, also those that cannot take part
        listener = network.listen_on_one(address, ports)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._gate = network.Gate(listener, secret, self._admit, self._note_refused, cluster.run)

    def next_pool(self) -> int:
        """Returns a new number for a pool."""
        return next(self._pools)

    def members(self) -> list[Member]:
        """Returns the other hosts that have joined and are not lost, in order."""
        with self._changed:
            return [m for _, m in sorted(self._members.items()) if not m.lost]

    def total(self) -> int:
        """Returns the number of workers on this host and on `members`."""
        return self.workers + sum(member.workers for member in self.members())

    def wait_for_all(self, seconds: float) -> None:
        """Waits until all hosts have joined, with all processes that a launcher has started.

        Raises:
            NanoError: Some have not joined after `seconds`, or cannot take part.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while names := self._missing():
                if self._declined:
                    raise NanoError(self._declined)
                left = deadline - time.monotonic()
                if left <= 0:
                    refused = "".join(
                        f" Refused{f' {times} times' if times > 1 else ''}: {text}"
                        for text, times in self._refused.items()
                    )
                    raise NanoError(
                        f"All hosts of a run must join within {seconds:.0f} s ({JOIN_VARIABLE}). "
                        f"Received: nothing from {', '.join(names)}; this host, "
                        f"{self.cluster.current}, listens on {self.address[0]} port "
                        f"{self.address[1]}.{refused} Run the same command there, and see that "
                        "this port can be reached."
                    )
                self._changed.wait(left)

    def _missing(self) -> list[str]:
        """Returns the names of the hosts that have not joined, or lack processes."""
        launched = self.cluster.launched or (1,) * self.cluster.size
        waiting = collections.Counter(host for host, _ in self._waiting)
        lends = {0, *self._members}  # this host's own process is here
        return [
            name
            for host, name in enumerate(self.cluster.hosts)
            if host not in lends or waiting[host] < launched[host] - 1
        ]

    def _note_refused(self, why: str) -> None:
        with self._changed:
            if len(self._refused) < _REFUSED_KEPT or why in self._refused:
                self._refused[why] += 1

    def _admit(self, join: agent_messages.Join, channel: Channel) -> None:
        declined = self._failing(join)
        why = declined or self._repeated(join)
        with self._changed:
            answer = self._bye or (agent_messages.Refused(why) if why else agent_messages.Welcome())
            with contextlib.suppress(ChannelClosed):  # it has gone already
                channel.send(answer)
            if not isinstance(answer, agent_messages.Welcome):
                channel.close()
            elif join.lends:
                if join.host in self._members:
                    self._members[join.host].replace()
                self._members[join.host] = Member(join, channel)
            else:
                self._waiting.append((join.host, channel))
            self._declined = self._declined or declined
            self._came += 1
            self._changed.notify_all()
        if why:
            self._note_refused(why)

    def _failing(self, join: agent_messages.Join) -> str:
        """Returns why the run cannot begin with a process, or nothing."""
        if join.declines:
            return f"Host {join.name} cannot take part: {join.declines}"
        if not 0 <= join.host < self.cluster.size:
            return (
                f"All hosts must know the same hosts. Host number {join.host} joined, and there "
                f"are {self.cluster.size}."
            )
        ours = dict(versions())
        others = [
            f"{package} {version} there, {ours.get(package)} here"
            for package, version in join.versions
            if ours.get(package) != version
        ]
        if others:
            return (
                f"All hosts must have the same versions. Host {join.name} has {'; '.join(others)}."
            )
        return ""

    def _repeated(self, join: agent_messages.Join) -> str:
        """Returns why a host cannot join again, or nothing."""
        with self._changed:
            present = self._members.get(join.host)
        if join.lends and present is not None and present.answers():
            return f"A host joins once. Host {join.name} has joined already."
        return ""

    def dismiss(self, code: int) -> None:
        """Ends the run on all hosts."""
        self._send_away(agent_messages.Bye(code))
        self._gate.close()

    def give_up(self, why: str, seconds: float) -> None:
        """Ends a run that cannot begin, on all hosts, also on those that come in some seconds.

        Args:
            why: shown there.
        """
        deadline = time.monotonic() + seconds
        self._send_away(agent_messages.Bye(1, why))
        with self._changed:
            others = sum(self.cluster.launched or (1,) * self.cluster.size) - 1
            while self._came < others and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        self._gate.close()

    def _send_away(self, bye: agent_messages.Bye) -> None:
        """Ends the run on the hosts that are here, and makes `_admit` answer so. Once."""
        with self._changed:
            if self._bye is not None:
                return
            self._bye = bye
            members, waiting = list(self._members.values()), list(self._waiting)
            self._members.clear()
            self._waiting.clear()
        for member in members:
            member.dismiss(bye)
        for _, channel in waiting:
            with contextlib.suppress(ChannelClosed):
                channel.send(bye)
            channel.close()


@functools.cache  # looks through the files of all installed packages: seconds
def versions() -> Sequence[tuple[str, str]]:
    """Returns what must be equal on all hosts, without importing TensorFlow."""
    import platform
    from importlib import metadata

    import nanotf

    found = [("nanotf", nanotf.__version__), ("Python", platform.python_version())]
    # Packages of several names provide the module `tensorflow`.
    for package in sorted(set(metadata.packages_distributions().get("tensorflow", ()))):
        found.append((package, metadata.version(package)))
    return found


# Set by `nanotf run` on the first of several hosts; None in every other process.
current: Hosts | None = None
