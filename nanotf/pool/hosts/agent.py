"""The process on a host that lends its workers to the first one.

It is `nanotf run` on every other host, or an actor on a node of a Ray cluster.

The thread that reads the connection to the first host starts and ends workers. Others accept the
connections between hosts, and report every second that this host works.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nanotf.console import say
from nanotf.errors import NanoError
from nanotf.machine.cluster import Cluster
from nanotf.pool.handles import Worker
from nanotf.pool.hosts import agent_messages, members
from nanotf.pool.hosts.lending import Lending
from nanotf.wire import network, timing
from nanotf.wire.channel import Channel, ChannelClosed

LOST_CODE = 1  # exit code if the connection to the first host ends before the script


class LentProcesses(Protocol):
    """The processes that a host lends: the workers of one pool, or ranks."""

    pool: int
    failed_code: int  # exit code of the first of them that failed by itself, as shells report it

    def lent(self) -> agent_messages.Lent:
        """Returns the message that describes them."""

    def take(self, message: Any, content: Any) -> None:
        """Takes a message for them."""

    def worker(self, rank: int) -> Worker | None:
        """Returns one that can be asked for its log and stack; None without one."""

    def poll(self) -> tuple[int, ...]:
        """Reports those that have ended. Returns the ranks that a signal has stopped."""

    def close(self) -> None:
        """Ends them."""


class Agent:
    """This host's part in a run whose script runs elsewhere.

    Args:
        workers: how many workers it lends; 0 to only wait for the end of the run.
        secret: the run's.
        address: the one at which the other hosts reach this one.
        first: the address of the first host, and the ports on one of which it listens.
        part: see `neighbours.plan`.
        lend_for: starts what a message `Lend` asks for; see `Lending`.
        what: the word for one of those.

    Attributes:
        failed_code: int, that of what it has lent last; see `LentProcesses`.
    """

    def __init__(
        self,
        cluster: Cluster,
        workers: int,
        secret: bytes,
        address: str,
        first: tuple[str, Sequence[int]],
        part: float = 1.0,
        lend_for: Callable[..., LentProcesses] = Lending,
        what: str = "worker",
    ) -> None:
        self._lend_for, self._what = lend_for, what
        self._cluster, self._workers, self._secret = cluster, workers, secret
        self._part = part
        self._first = first
        self._lending: LentProcesses | None = None
        self.failed_code = 0
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._leaders: dict[tuple[int, int], int] = {}  # guarded; descriptors by pool and host
        self._gate: network.Gate | None = None
        self._address: tuple[str, int] = ("", 0)
        if workers:
            listener = network.listen(address)
            self._address = listener.getsockname()[:2]
            self._gate = network.Gate(listener, secret, self._admit)

    def run(self) -> int:
        """Lends workers until the script ends.

        Returns:
            The script's exit code, or `LOST_CODE` if the connection ended before the script.

        Raises:
            NanoError: The first host did not answer, or refused this one.
        """
        try:
            self._channel, answer = self._join()
        except BaseException:
            self._close_gate()
            raise
        try:
            if isinstance(answer, agent_messages.Bye):
                return self._end_with(answer)
            if self._workers:
                threading.Thread(target=self._beat, name="nanotf-agent", daemon=True).start()
            return self._serve()
        except ChannelClosed:
            say(f"lost the connection to host {self._cluster.hosts[0]}, which runs the script.")
            return LOST_CODE
        finally:
            self._ended.set()
            self._take_back()
            self._close_gate()
            self._channel.close()

    def decline(self, why: str, seconds: float) -> None:
        """Tells the first host, if it answers in some seconds, that this one cannot take part."""
        versions, deadline = tuple(members.versions()), time.monotonic() + seconds
        (address, ports), run = self._first, self._cluster.run
        with contextlib.suppress(network.Unreachable, network.WrongSecret, ChannelClosed):
            channel = network.connect(address, ports, self._secret, deadline, run=run)
            self._introduce(channel, versions, why)
            channel.close()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def _join(self) -> tuple[Channel, Any]:
        name, seconds = self._cluster.hosts[0], members.join_seconds()
        # Before the connection: a peer has seconds to say who it is, and the first look at all
        # packages takes longer on a busy machine or a cold network file system.
        versions = tuple(members.versions())
        deadline = time.monotonic() + seconds
        reached = [False]
        (address, ports), run = self._first, self._cluster.run
        shown = f"{address} port {', '.join(map(str, ports))}"

        def waits() -> None:
            if not reached[0]:
                say(f"waiting for host {name} ({shown}).")
                reached[0] = True

        try:
            while True:
                channel = network.connect(address, ports, self._secret, deadline, waits, run)
                try:
                    answer = self._introduce(channel, versions)
                    break
                except ChannelClosed as error:  # it had no room for another connection
                    if time.monotonic() > deadline:
                        raise network.Unreachable(str(error)) from error
        except network.Unreachable as error:
            raise NanoError(
                f"The first host must answer within {seconds:.0f} s ({members.JOIN_VARIABLE}). "
                f"Received: host {name}, {shown}: {error}. Run the same command there, and see "
                "that this port can be reached."
            ) from error
        except network.WrongSecret as error:
            raise NanoError(
                "All hosts of a run need the same secret. Received: another one than host "
                f"{name}'s ({error}). Set NANOTF_SECRET to the same value on all hosts."
            ) from error
        if isinstance(answer, agent_messages.Refused):
            channel.close()
            raise NanoError(f"{answer.text} Received by host {self._cluster.current} from {name}.")
        return channel, answer

    def _introduce(
        self, channel: Channel, versions: tuple[tuple[str, str], ...], declines: str = ""
    ) -> Any:
        """Says who this host is; returns the answer."""
        own, workers = self._cluster, self._workers
        try:
            channel.send(
                agent_messages.Join(
                    own.rank,
                    own.current,
                    versions,
                    workers > 0,
                    workers,
                    self._address,
                    declines,
                )
            )
            return channel.receive()
        except ChannelClosed:
            channel.close()
            raise

    # ------------------------------------------------------------------------ first host
    def _serve(self) -> int:
        if self._workers:
            say(
                f"host {self._cluster.current} lends {self._workers} "
                f"{self._what}{'s' * (self._workers > 1)} to {self._cluster.hosts[0]} until its "
                "script ends."
            )
        while True:
            message = self._channel.receive()
            if isinstance(message, agent_messages.Bye):
                return self._end_with(message)
            self._handle(message)

    def _end_with(self, bye: agent_messages.Bye) -> int:
        """Says why the script has not begun, if it has not. Returns its exit code."""
        if bye.why:
            say(f"host {self._cluster.hosts[0]} does not run the script: {bye.why}", sys.stderr)
        return bye.code

    def _handle(self, message: Any) -> None:
        if isinstance(message, agent_messages.Lend):
            self._lend(message)
        elif isinstance(message, agent_messages.Ask):
            self._answer(message)
        elif isinstance(message, agent_messages.TakeBack):
            if self._holds(message.pool):
                self._take_back()
        elif isinstance(message, agent_messages.ForWorkers):
            content = self._content(message)  # also for an ended pool: it is in the stream
            if self._lending is not None and self._holds(message.pool):
                self._lending.take(message, content)

    def _content(self, message: Any) -> Any:
        """Returns the bytes that follow a message; None if there are none."""
        if not isinstance(message, agent_messages.Fill):
            return None
        import numpy as np  # the front of a server imports this module, and has no arrays

        content = np.empty(message.nbytes, np.uint8)
        self._channel.receive_into(content.data)
        return content

    def _holds(self, pool: int) -> bool:
        """Returns False for late messages, which are for an ended pool."""
        return self._lending is not None and self._lending.pool == pool

    def _tell(self, message: Any, *contents: Any) -> None:
        with contextlib.suppress(ChannelClosed):  # `_serve` notices, too
            self._channel.send_with(message, *contents)

    def _lend(self, order: agent_messages.Lend) -> None:
        self._take_back()
        try:
            self._lending = self._lend_for(
                order, self._secret, self._part, self._accepted, self._tell
            )
        except ChannelClosed:
            raise
        except (NanoError, OSError) as error:
            self._tell(agent_messages.NotLent(order.pool, f"{type(error).__name__}: {error}"))
            return
        self._tell(self._lending.lent())

    def _take_back(self) -> None:
        lending, self._lending = self._lending, None
        if lending is not None:
            lending.close()
            self.failed_code = lending.failed_code

    def _answer(self, asked: agent_messages.Ask) -> None:
        if asked.question == "clock":
            self._tell(agent_messages.Answer(asked.number, timing.now()))
            return
        lending = self._lending
        worker = None if lending is None else lending.worker(asked.rank)

        def answer() -> None:  # in a thread, since a stack takes seconds
            value = ""
            if worker is not None and lending is not None and lending.pool == asked.pool:
                value = worker.stack() if asked.question == "stack" else worker.log_tail()
            self._tell(agent_messages.Answer(asked.number, value))

        threading.Thread(target=answer, name="nanotf-answer", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(agent_messages.BEAT_SECONDS):
            lending, stopped = self._lending, ()  # type: LentProcesses | None, tuple[int, ...]
            if lending is not None:
                with contextlib.suppress(OSError, ValueError):  # it is being ended
                    stopped = lending.poll()
            self._tell(agent_messages.Beat(stopped))

    # ----------------------------------------------------------------------- other hosts
    def _admit(self, leader: Any, channel: Channel) -> None:
        fd = network.hand_over(channel)
        with self._changed:
            self._leaders[leader.pool, leader.host] = fd
            self._changed.notify_all()

    def _accepted(self, pool: int, host: int, name: str, deadline: float) -> int:
        """Waits for the connection of another host. Returns its descriptor."""
        with self._changed:
            while (pool, host) not in self._leaders:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NanoError(
                        f"The hosts of a run must reach each other. Received: host {name} has not "
                        f"connected to {self._cluster.current}. Open all TCP ports between them."
                    )
                self._changed.wait(left)
            return self._leaders.pop((pool, host))
