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

    def dismiss(self, code: int) -> None:
        """Tells it that the script has ended, and closes the connection."""
        self._listener = None
        self.lost = self.lost or "the script has ended"
        self.send(agent_messages.Bye(code))
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
        self._waiting: list[Channel] = []  # of processes that lend nothing
        self._refused: collections.Counter[str] = collections.Counter()
        self._code: int | None = None  # of the script, once it has ended
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
        """Waits until all hosts have joined.

        Raises:
            NanoError: Some have not joined after `seconds`.
        """
        missing = set(range(1, self.cluster.size))
        deadline = time.monotonic() + seconds
        with self._changed:
            while not missing <= self._members.keys():
                left = deadline - time.monotonic()
                if left <= 0:
                    names = [self.cluster.hosts[i] for i in sorted(missing - self._members.keys())]
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

    def _note_refused(self, why: str) -> None:
        with self._changed:
            if len(self._refused) < _REFUSED_KEPT or why in self._refused:
                self._refused[why] += 1

    def _admit(self, join: agent_messages.Join, channel: Channel) -> None:
        why = self._objection(join)
        with contextlib.suppress(ChannelClosed):  # it has gone already
            channel.send(agent_messages.Refused(why) if why else agent_messages.Welcome())
        if why:
            self._note_refused(why)
            channel.close()
            return
        with self._changed:
            if self._code is not None:  # while it introduced itself
                with contextlib.suppress(ChannelClosed):
                    channel.send(agent_messages.Bye(self._code))
                channel.close()
            elif join.lends:
                if join.host in self._members:
                    self._members[join.host].replace()
                self._members[join.host] = Member(join, channel)
            else:
                self._waiting.append(channel)
            self._changed.notify_all()

    def _objection(self, join: agent_messages.Join) -> str:
        """Returns why a host cannot join, or nothing."""
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
        with self._changed:
            present = self._members.get(join.host)
        if join.lends and present is not None and present.answers():
            return f"A host joins once. Host {join.name} has joined already."
        return ""

    def dismiss(self, code: int) -> None:
        """Ends the run on all hosts."""
        with self._changed:
            members, waiting = list(self._members.values()), list(self._waiting)
            self._members.clear()
            self._waiting.clear()
            if self._code is not None:
                return
            self._code = code
        self._gate.close()
        for member in members:
            member.dismiss(code)
        for channel in waiting:
            with contextlib.suppress(ChannelClosed):
                channel.send(agent_messages.Bye(code))
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
