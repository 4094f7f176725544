"""Ranks on several hosts: what the first host and the others tell each other.

first host                                   every other host
  Lend ->                                      starts its ranks (`LentRanks`)
  <- Lent
  <- FromWorker (`WorkerDied`)                 a rank there was the first to fail
  Deliver (`WorkerDied`) ->                    a rank elsewhere was
  Tell (signal) ->
  <- WorkerEnded                               for each rank
  Bye (exit code) ->                           all ranks of all hosts have ended
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from nanotf.collectives.spec import HostsSpec
from nanotf.errors import WorkerDied
from nanotf.machine import neighbours
from nanotf.pool.handshake import START_SECONDS
from nanotf.pool.hosts import agent_messages, leaders
from nanotf.pool.hosts.members import Hosts, Member
from nanotf.pool.hosts.remote import Said
from nanotf.pool.stalls import stall_seconds
from nanotf.ranks.rank_crew import OtherRanks, exit_code_of, started
from nanotf.ranks.rank_order import RankScript


def run(script: RankScript, hosts: Hosts) -> tuple[int, bool]:
    """Runs a script as ranks on this host, the first, and on the others; see `rank_launch.run`."""
    members, pool = hosts.members(), hosts.next_pool()
    spec = HostsSpec(
        0,
        (hosts.workers, *(member.workers for member in members)),
        (hosts.cluster.current, *(member.name for member in members)),
        stall_seconds(),
    )
    addresses = (hosts.address, *(member.address for member in members))
    others = _RanksOfMembers([_Watched(m, pool, spec.ranks(i)) for i, m in enumerate(members, 1)])
    plan = neighbours.plan(hosts.workers)
    with ExitStack() as stack:
        others.lend(spec, addresses)
        fds: list[int] = []
        closing = stack.enter_context(ExitStack())
        for fd in leaders.connected(pool, spec, addresses, hosts.secret, leaders.none_accepted):
            closing.callback(os.close, fd)
            fds.append(fd)
        others.wait_started()  # a host that could not raises here, before a rank of this one runs
        crew = stack.enter_context(started(script, spec, plan, fds, others))
        closing.close()  # the first rank has them: they end with it
        crew.watch()
    return crew.result(), not crew.failed_here


class _Watched:
    """The ranks of another host, as the first one sees them. A `members.Listener`."""

    def __init__(self, member: Member, pool: int, ranks: Sequence[int]) -> None:
        self.member, self.pool, self.ranks = member, pool, ranks
        # The thread that reads from the host puts, `_RanksOfMembers.failures` takes.
        self.failures: queue.SimpleQueue[WorkerDied] = queue.SimpleQueue()
        self._left = set(ranks)  # written by the thread that reads from the host

    def have_ended(self) -> bool:
        """Returns True once none of them runs any more, or nobody knows."""
        return not self._left or bool(self.member.lost)

    def said(self, rank: int, said: Said) -> None:
        """Takes a rank's failure."""
        self.failures.put(pickle.loads(said.body))

    def ended(self, rank: int, code: int) -> None:
        """Takes a rank's exit code."""
        self._left.discard(rank)

    def host_lost(self) -> None:
        """Records that the host is gone."""
        if self._left:
            which = ", ".join(map(str, sorted(self._left)))
            lost = f"was lost with host {self.member.name}: {self.member.lost}"
            rank = min(self._left)
            self.failures.put(WorkerDied(f"rank {which} {lost}", rank=rank))


class _RanksOfMembers(OtherRanks):
    """The ranks of all other hosts, on the first one."""

    def __init__(self, watched: Sequence[_Watched]) -> None:
        self._watched = watched

    def lend(self, spec: HostsSpec, addresses: tuple[tuple[str, int], ...]) -> None:
        """Asks the hosts to start their ranks."""
        for index, each in enumerate(self._watched, 1):
            own = dataclasses.replace(spec, index=index)
            # Each host has the environment of its own command.
            order = agent_messages.Lend(each.pool, own, addresses, None, b"", {}, spec.deadline)
            each.member.lend(order, each)

    def wait_started(self) -> None:
        """Waits until they have. Raises `NanoError` if one could not."""
        for each in self._watched:
            each.member.lent(each.pool, START_SECONDS)

    def have_ended(self) -> bool:
        return all(each.have_ended() for each in self._watched)

    def failures(self) -> Iterator[WorkerDied]:
        for each in self._watched:
            while not each.failures.empty():
                error = each.failures.get()
                self.tell_failure(error)
                yield error

    def tell_failure(self, error: WorkerDied) -> None:
        for each in self._watched:
            if error.rank not in each.ranks:  # else that host has reported it
                each.member.send(agent_messages.Deliver(each.pool, pickle.dumps(error)))

    def send(self, number: int) -> None:
        for each in self._watched:  # one message for all ranks of the host
            each.member.send(agent_messages.Tell(each.pool, each.ranks[0], number))


class LentRanks(OtherRanks):
    """The ranks of a host other than the first. Its methods for `OtherRanks` tell the first host.

    Args:
        tell: sends a message to the first host.

    Attributes:
        failed_code: int, the exit code of the first of all ranks that failed, if it is one of this
            host; else 0.
    """

    def __init__(
        self,
        script: RankScript,
        order: agent_messages.Lend,
        secret: bytes,
        accepted: leaders.Accepted,
        tell: Callable[..., None],
    ) -> None:
        self.pool, self._tell, self.failed_code = order.pool, tell, 0
        self._failures: queue.SimpleQueue[WorkerDied] = queue.SimpleQueue()
        hosts = order.hosts
        plan = neighbours.plan(len(hosts.ranks(hosts.index)))
        self._placements = plan.placements
        self._is_closing = False
        with ExitStack() as stack, ExitStack() as closing:
            fds: list[int] = []
            for fd in leaders.connected(self.pool, hosts, order.addresses, secret, accepted):
                closing.callback(os.close, fd)
                fds.append(fd)
            self._crew = stack.enter_context(started(script, hosts, plan, fds, self))
            self._thread = threading.Thread(target=self._watch, name="nanotf-ranks", daemon=True)
            self._thread.start()
            self._stack = stack.pop_all()  # the ranks outlive this block; `close` ends them

    def _watch(self) -> None:
        self._crew.watch()
        if self._is_closing:  # what ended them then was not theirs
            return
        self._crew.result()  # says what has failed

    # -------------------------------------------------------------------------- for the agent
    def lent(self) -> agent_messages.Lent:
        """Returns the message that describes them."""
        pids = self._crew.pids()
        return agent_messages.Lent(self.pool, tuple(zip(pids, self._placements, strict=True)))

    def take(self, message: Any, content: Any) -> None:
        """Takes the failure of a rank elsewhere, or a signal."""
        if isinstance(message, agent_messages.Deliver):
            self._failures.put(pickle.loads(message.body))
        elif isinstance(message, agent_messages.Tell):
            self._crew.send(message.signal)

    def worker(self, rank: int) -> None:
        """Returns None: the first host asks for no logs."""

    def poll(self) -> tuple[int, ...]:
        """Returns no ranks: the crew's own thread reports their ends."""
        return ()

    def close(self) -> None:
        """Ends the ranks."""
        self._is_closing = self._crew.is_running  # before `kill`, whose victims have not failed
        self._crew.kill()
        self._thread.join()  # before the stack closes what `watch` reads
        self._stack.close()

    # --------------------------------------------------------------------------- for the crew
    def failures(self) -> Iterator[WorkerDied]:
        while not self._failures.empty():
            yield self._failures.get()

    def tell_failure(self, error: WorkerDied) -> None:
        if not self._is_closing:
            self.failed_code = exit_code_of(
                error
            )  # before the first host hears of it, and says Bye
        body = pickle.dumps(error)
        self._tell(agent_messages.FromWorker(self.pool, error.rank or 0, body))

    def tell_end(self, rank: int, code: int) -> None:
        self._tell(agent_messages.WorkerEnded(self.pool, rank, code))
