"""The workers of one pool on an agent's host: started, connected, watched and ended here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

from nanotf import collectives
from nanotf.console import logger, say
from nanotf.errors import describe_exit
from nanotf.machine import neighbours, topology
from nanotf.pool import stalls
from nanotf.pool.handles import Worker
from nanotf.pool.hosts import agent_messages, leaders
from nanotf.pool.hosts.remote import Said, Twins
from nanotf.pool.local import LocalCrew
from nanotf.pool.outbox import END_SECONDS, Outbox, Parcel
from nanotf.wire import messages
from nanotf.wire.channel import Channel, packed


class Lending:
    """A pool's workers on this host.

    Args:
        secret: the run's.
        part: see `neighbours.plan`.
        accepted: see `leaders.Accepted`.
        tell: sends a message, and bytes that follow it, to the first host.

    Attributes:
        failed_code: int, see `LentProcesses`.

    Raises:
        NanoError: This host has too few cores, or another host cannot be reached.
    """

    def __init__(
        self,
        order: agent_messages.Lend,
        secret: bytes,
        part: float,
        accepted: leaders.Accepted,
        tell: Callable[..., None],
    ) -> None:
        self.pool, self._order, self._tell = order.pool, order, tell
        self.failed_code = 0
        self._asked: set[int] = set()  # ranks that got a signal from the first host
        self._is_closing = False
        hosts = order.hosts
        ranks = hosts.ranks(hosts.index)
        self._twins = Twins(len(ranks))
        self._outboxes: list[Outbox] = []
        self._readers: list[threading.Thread] = []
        self._reported: set[int] = set()
        self._lock = threading.Lock()  # guards `_reported`: readers, `poll` and `close` report ends
        plan = neighbours.plan(len(ranks), order.cores_per_process, part=part)
        placements = tuple(
            dataclasses.replace(place, rank=rank)
            for rank, place in zip(ranks, plan.placements, strict=True)
        )
        plan = topology.Plan(placements)
        self._connections: list[int] = []
        self._group = collectives.create_group(
            plan.size, nodes=plan.like_nodes(), deadline=order.stall_seconds
        )
        self._crew = LocalCrew(plan, "shm", order.key, {**os.environ, **order.environ})
        try:
            for fd in leaders.connected(self.pool, hosts, order.addresses, secret, accepted):
                self._connections.append(fd)
            self._crew.start()
            for worker in self._crew.workers:
                self._attend(worker)
        except BaseException:
            self.close()
            raise

    def lent(self) -> agent_messages.Lent:
        """Returns the message that describes the workers."""
        found = [
            (worker.process.pid, placement)
            for worker, placement in zip(
                self._crew.workers, self._crew.here.placements, strict=True
            )
        ]
        return agent_messages.Lent(self.pool, tuple(found))

    # ---------------------------------------------------------------- first host to worker
    def take(self, message: Any, content: Any) -> None:
        """Takes a message for the workers.

        Args:
            content: the bytes that have followed it, if any.
        """
        if isinstance(message, agent_messages.Create):
            self._twins.create(message.new)
        elif isinstance(message, agent_messages.Fill):
            self._twins.write(message.key, message.offset, content)
        elif isinstance(message, agent_messages.Deliver):
            self._twins.deliver(pickle.loads(message.body), self._put)
        elif isinstance(message, agent_messages.Tell):
            worker = self.worker(message.rank)
            if worker is not None:
                self._asked.add(worker.rank)
                worker.process.send_signal(message.signal)

    def _put(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, messages.Setup):
            self._set_up(message)
            return
        parcel = Parcel(packed(message), fds, len(self._outboxes))
        for outbox in self._outboxes:
            outbox.put(parcel)

    def _set_up(self, setup: messages.Setup) -> None:
        setup = dataclasses.replace(setup, group=self._group.spec, hosts=self._order.hosts)
        for outbox in self._outboxes:
            # All go to the first worker, which leads its host.
            connections, self._connections = self._connections, []
            own = dataclasses.replace(setup, connections=len(connections))
            outbox.put(Parcel(packed(own), [self._group.fd, *connections], 1))
            for fd in connections:  # the parcel has copies
                os.close(fd)

    # ---------------------------------------------------------------- worker to first host
    def _attend(self, worker: Worker) -> None:
        name = f"nanotf-to-{worker.rank}"
        outbox = Outbox(worker.channel, name, lambda error: worker.process.kill())
        self._outboxes.append(outbox)
        outbox.begin()
        reader = threading.Thread(
            target=self._read, args=(worker,), name=f"nanotf-{worker.rank}", daemon=True
        )
        reader.start()
        self._readers.append(reader)

    def _read(self, worker: Worker) -> None:
        channel = worker.channel
        try:
            channel.show_key_second(self._order.key)
            while True:
                self._pass_on(worker.rank, channel)
        except (EOFError, OSError):
            pass  # the worker has exited
        except Exception as error:  # no memory or descriptor for a message
            logger.warning("A message of worker %d is lost.", worker.rank, exc_info=error)
        self._tell(agent_messages.FromWorker(self.pool, worker.rank, b""))
        with contextlib.suppress(Exception):
            worker.process.wait(stalls.stall_seconds())
        self._report_end(worker)

    def _pass_on(self, rank: int, channel: Channel) -> None:
        said: Said = self._twins.take(channel.receive(), channel)
        written = tuple((key, offset, len(content)) for key, offset, content in said.written)
        block = None if said.block is None else len(said.block)
        contents = [content for _, _, content in said.written]
        if said.block is not None:
            contents.append(said.block)
        self._tell(agent_messages.FromWorker(self.pool, rank, said.body, written, block), *contents)

    def _report_end(self, worker: Worker) -> None:
        code = worker.process.poll()
        with self._lock:
            if code is None or worker.rank in self._reported:
                return
            self._reported.add(worker.rank)
            if code and not (self._is_closing or self.failed_code or worker.rank in self._asked):
                # Before the first host hears of it, and ends the script.
                phrase, _, number = describe_exit(code)
                self.failed_code = code if number is None else 128 + number
                say(f"worker {worker.rank} (process {worker.process.pid}) {phrase}.", sys.stderr)
        self._tell(agent_messages.WorkerEnded(self.pool, worker.rank, code))

    # -------------------------------------------------------------------------- its life
    def poll(self) -> tuple[int, ...]:
        """Reports workers that have ended. Returns the ranks that a signal has stopped."""
        stopped = []
        for worker in self._crew.workers:
            self._report_end(worker)
            worker.trim_log()
            if worker.is_stopped():
                stopped.append(worker.rank)
        return tuple(stopped)

    def worker(self, rank: int) -> Worker | None:
        """Returns a worker, or None if this host has no such rank."""
        return next((worker for worker in self._crew.workers if worker.rank == rank), None)

    def close(self) -> None:
        """Kills the workers and frees their memory. May be called twice."""
        self._is_closing = True
        for worker in self._crew.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self._crew.workers:
            worker.wait_killed()
            self._report_end(worker)
            worker.channel.shut_down()
        for outbox in self._outboxes:
            outbox.end()
        for reader in self._readers:
            reader.join(END_SECONDS)
        for worker in self._crew.workers:
            worker.close()
        self._outboxes, self._readers = [], []
        for fd in self._connections:
            os.close(fd)
        self._connections = []
        self._crew.close()
        self._group.close()
