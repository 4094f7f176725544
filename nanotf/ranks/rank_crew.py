"""The processes of a host's ranks: started, watched and ended here.

A rank that fails fails all: the others raise in their next call that communicates, and are stopped
if they make none. Ranks that wait for each other in unlike collectives fail, too. A rank that waits
for longer than NANOTF_STALL_SECONDS is named in a warning. `rank_process` is the code of a rank's
process.

Sets for each rank, besides a worker's variables: TF_CONFIG, as `MultiWorkerMirroredStrategy` reads
it, and HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE, HOROVOD_CROSS_RANK and
HOROVOD_CROSS_SIZE, as Horovod's launcher does.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from nanotf.collectives.spec import HostsSpec, create_group
from nanotf.console import say
from nanotf.errors import CollectiveError, WorkerDied, describe_exit
from nanotf.machine import cluster, topology
from nanotf.machine.interpreter import python_command
from nanotf.machine.processes import Output, OwnedProcess
from nanotf.parent.loop.divergence import DivergenceDetector
from nanotf.pool.local import worker_variables
from nanotf.pool.stalls import stall_seconds
from nanotf.ranks import this_rank
from nanotf.ranks.rank_order import GroupSeat, RankOrder, RankScript
from nanotf.ranks.rank_output import RankOutput
from nanotf.sagemaker.smp.mailboxes.mailbox_owner import MailboxOwner, supervised
from nanotf.wire.memory_files import anonymous_file
from nanotf.wire.ports import free_port

if TYPE_CHECKING:
    from nanotf.collectives.spec import GroupOwner

_POLL_SECONDS = 0.1  # between looks at the processes, without output
_LOOK_SECONDS = 1.0  # between looks at collectives that wait
_NEWS_SECONDS = 5.0  # for the other ranks to raise after one has failed, then SIGTERM
_TERM_SECONDS = 5.0  # from SIGTERM to SIGKILL
_MOMENT_SECONDS = 1.0  # for the ranks to end after Ctrl-C; then a line says that they have not yet
_MARGIN_SECONDS = 10.0  # a host's own group waits longer than hosts for each other; `HostsSpec`
_SAME_CALLS = (
    "All ranks must make the same collectives, in the same order.",
    "Let no rank skip a step, an epoch or a call of Horovod or tf.distribute that others make.",
)


class OtherRanks:
    """The ranks of other hosts, as a crew sees them. This class stands for none."""

    def have_ended(self) -> bool:
        """Returns True if this host need not wait for them."""
        return True

    def failures(self) -> Iterator[WorkerDied]:
        """Yields those that have failed since the last call, and hosts that are lost."""
        return iter(())

    def tell_end(self, rank: int, code: int) -> None:
        """Tells the other hosts that a rank of this one has ended.

        Args:
            code: 0, or that of a consequence of another rank's failure.
        """

    def tell_failure(self, error: WorkerDied) -> None:
        """Tells the other hosts that a rank has failed: one of this host, the first to fail."""

    def send(self, number: int) -> None:
        """Sends a signal to them."""


@contextmanager
def started(
    script: RankScript,
    hosts: HostsSpec,
    plan: topology.Plan,
    connections: Sequence[int] = (),
    others: OtherRanks | None = None,
) -> Iterator[RankCrew]:
    """Starts the ranks of this host, and ends them at the end.

    Call it in the main thread, by whose end the ranks would end.

    Args:
        hosts: with all ranks.
        plan: the placements of those of this host.
        connections: see `collectives.Group.attach`; the caller closes them.
        others: None if there are none.
    """
    ranks, is_alone = hosts.ranks(hosts.index), len(hosts.counts) == 1
    margin = 0.0 if is_alone else _MARGIN_SECONDS
    with ExitStack() as stack:
        # Rank 0 inherits this process's output; the others write to pipes.
        logs = RankOutput(len(ranks) - (0 in ranks), script.shows_all_ranks)
        stack.callback(logs.close)
        if sys.stderr is not None:  # a line that stays: the terminal is rank 0's from now on
            say(f"starting {_shown(hosts)}{logs.about(ranks)}", sys.stderr)
        owner = None
        if is_alone:  # `nanotf.smp` runs on one host, see `rank_launch.number`
            owner = MailboxOwner(len(ranks), stall_seconds())
            stack.callback(owner.close)
        group = stack.enter_context(create_group(len(ranks), deadline=stall_seconds() + margin))
        output = Output(logs.write)
        stack.callback(output.close)
        crew = RankCrew(hosts, owner, group, output, others or OtherRanks())
        stack.callback(crew.kill)  # runs before the ranks' group, mailboxes and pipes close
        tasks = _tasks(hosts)
        for rank, place in zip(ranks, plan.placements, strict=True):
            placement = dataclasses.replace(place, rank=rank)  # the plan counts this host's from 0
            # A host's first rank exchanges with other hosts for all of its ranks.
            own = tuple(connections) if rank == ranks[0] else ()
            seat = GroupSeat(group.spec, rank, group.fd, hosts, own)
            mailbox = None if owner is None else owner.spec(rank)
            order = RankOrder(script, placement, mailbox, seat, cluster.cluster())
            crew.start(order, rank_variables(rank, hosts.counts, tasks))
        stack.enter_context(_forwarded(crew))
        if owner is not None:
            stack.enter_context(supervised(owner))
        yield crew
        output.drain()
        logs.failed = crew.has_failed


def _shown(hosts: HostsSpec) -> str:
    ranks = hosts.ranks(hosts.index)
    if len(hosts.counts) == 1:
        return f"{len(ranks)} ranks"
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{which} of {hosts.size}"


def _tasks(hosts: HostsSpec) -> list[str]:
    """Returns an address for each rank. Ranks open no port there."""
    if len(hosts.counts) == 1:
        return [f"127.0.0.1:{free_port()}" for _ in range(hosts.size)]
    # The same on all hosts.
    return [
        f"{name}:{cluster.TF_CONFIG_PORT + number}"
        for name, count in zip(hosts.names, hosts.counts, strict=True)
        for number in range(count)
    ]


def rank_variables(rank: int, counts: Sequence[int], tasks: Sequence[str]) -> dict[str, str]:
    """Returns the variables by which scripts find their rank.

    Args:
        counts: the number of ranks by host.
        tasks: an address for each rank.
    """
    place = this_rank.RankPlace.of(rank, counts)
    numbers = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
    }
    task = {"type": "worker", "index": rank}
    return {
        "TF_CONFIG": json.dumps({"cluster": {"worker": list(tasks)}, "task": task}),
        **{f"HOROVOD_{name}": str(number) for name, number in numbers.items()},
    }


class RankCrew:
    """The processes of this host's ranks.

    Args:
        hosts: with all ranks.
        owner: makes the mailboxes; None on one of several hosts. The caller closes it.
        group: of the ranks of this host; the caller closes it.
        output: reads the output of all but rank 0.
        others: the ranks of other hosts.
    """

    def __init__(
        self,
        hosts: HostsSpec,
        owner: MailboxOwner | None,
        group: GroupOwner,
        output: Output,
        others: OtherRanks,
    ) -> None:
        self._hosts, self._ranks = hosts, hosts.ranks(hosts.index)
        self._owner, self._group, self._output = owner, group, output
        self._others = others
        self._divergence = DivergenceDetector("the script", len(self._ranks), _SAME_CALLS)
        self._programs: list[OwnedProcess] = []
        self._ended: set[int] = set()  # places in the group whose ranks have ended as they should
        # Written by a handler of signals, for the other hosts.
        self._signals: collections.deque[int] = collections.deque()
        self._looking_at = 0.0  # when `_divergence` looks again
        self._failed: WorkerDied | None = None  # of the first rank to fail, on any host
        self._code = 0  # of the command: see `exit_code_of`
        self.failed_here = False  # the first rank that has failed is one of this host's
        # A failure that another host's may have caused, and until when it has time to be told.
        self._held: tuple[WorkerDied, float] | None = None
        self._is_interrupted = False  # by a signal to this process
        self._told_at: float | None = None  # when a line says what Ctrl-C does
        self._killing_at: float | None = None  # when SIGKILL follows
        self._terminating_at: float | None = None  # when SIGTERM follows

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed."""
        return self._failed is not None

    def start(self, order: RankOrder, variables: Mapping[str, str]) -> None:
        """Starts a rank's process.

        Args:
            variables: of this rank, besides those of a worker.
        """
        rank, data = order.seat.rank, pickle.dumps(order)
        passed = [order.seat.fd, *order.seat.connections]
        if order.mailbox is not None:
            passed += order.mailbox.fds
        # Not a pipe: nobody reads it yet, and an order larger than its buffer would block `write`.
        fd = anonymous_file(0, fixed=False)
        try:
            os.write(fd, data)
            command = python_command(
                "nanotf.ranks.rank_process", str(fd), str(os.getpid()), str(rank)
            )
            pipe = None if rank == 0 else subprocess.PIPE
            process = subprocess.Popen(
                command,
                env={**worker_variables(order.placement, os.environ), **variables},
                # Several readers would take lines from each other.
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[fd, *passed],
                start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
            )
        finally:
            os.close(fd)
        program = OwnedProcess(str(rank), command, process)
        self._programs.append(program)
        if self._owner is not None:
            self._owner.release(rank)
        if rank > 0:
            self._output.add(program)

    def watch(self) -> None:
        """Waits until all have ended, on all hosts for which this one is to wait."""
        running, left = dict(zip(self._ranks, self._programs, strict=True)), True
        while running or left or self._held is not None:
            if self._output.is_open:  # not with one rank, or once the others have ended
                self._output.read(_POLL_SECONDS)
            else:
                time.sleep(_POLL_SECONDS)
            for rank, program in list(running.items()):
                if not program.is_running:
                    del running[rank]
                    if self._output.is_open:
                        self._output.read(0.0)  # its last lines tell why
                    self._note_end(rank, program)
            left = not self._others.have_ended()  # before: what they say comes before their end
            for error in self._others.failures():
                self._fail(error, here=False)
            self._look_at_held()  # after the other hosts' news, which may be its cause
            while self._signals:
                self._others.send(self._signals.popleft())
            self._look_at_collectives()
            self._hurry(list(running.values()))

    def _look_at_collectives(self) -> None:
        """Fails all ranks if they wait for each other in unlike collectives."""
        now = time.monotonic()
        if now < self._looking_at or self.has_failed:
            return
        self._looking_at = now + _LOOK_SECONDS
        try:
            self._divergence.poll(self._group, self._ended)
        except CollectiveError as error:
            # Each rank raises it in its own script; `watch` then sees the first that ends by it.
            self._group.abort(str(error))

    def send(self, number: int) -> None:
        """Sends a signal to all. SIGKILL follows: after some seconds, or at a second Ctrl-C."""
        # `watch` sends it on: this handler may have interrupted a send that holds the lock.
        self._signals.append(number)
        if self._is_interrupted and number == signal.SIGINT:
            for program in self._programs:
                program.kill_group()
            # A signal handler calls this: it may have interrupted another print.
            with suppress(OSError, RuntimeError):
                say("the ranks are killed.", sys.stderr)
            return
        for program in self._programs:
            if program.is_running:
                # Not the group: a script that saves something may need its own processes for that.
                program.send_signal(number)
        self._is_interrupted, now = True, time.monotonic()
        if number == signal.SIGINT:
            self._told_at = now + _MOMENT_SECONDS
        if self._killing_at is None:  # a second signal does not postpone the end
            self._killing_at = now + _NEWS_SECONDS + _TERM_SECONDS

    def kill(self) -> None:
        """Kills what is left of the processes and of those that they have started."""
        for program in self._programs:
            program.reap()

    @property
    def is_running(self) -> bool:
        """True while a rank of this host runs."""
        return any(program.is_running for program in self._programs)

    def pids(self) -> list[int]:
        """Returns the process ids, by rank."""
        return [program.process.pid for program in self._programs]

    def result(self) -> int:
        """Says which rank has failed, if one has. Returns the exit code."""
        if self._failed is not None and not self._is_interrupted:
            # Its output is here, or in a log of its host.
            say(self._failed.message if self.failed_here else str(self._failed), sys.stderr)
        return self._code

    def _note_end(self, rank: int, program: OwnedProcess) -> None:
        if program.exit_code == 0:
            self._ended.add(rank - self._ranks[0])
            if self._owner is not None:
                self._owner.tell_ended(rank)
        elif not self.has_failed and self._held is None:  # later failures follow from the first
            error = self._died(rank, program)
            cause = self._group.cause()
            if cause is not None and not set(cause.missing) & set(self._ranks):
                # The end of a connection is faster than the news of what has ended it.
                self._held = error, time.monotonic() + _NEWS_SECONDS
                return
            self._fail(error, here=True)
            self._others.tell_failure(error)
        self._others.tell_end(rank, program.exit_code)

    def _look_at_held(self) -> None:
        """Decides about a failure that another host's may have caused, once that is known."""
        if self._held is None:
            return
        error, until = self._held
        if not self.has_failed:
            if time.monotonic() < until:
                return
            self._fail(error, here=True)
            self._others.tell_failure(error)
        self._held = None
        self._others.tell_end(error.rank or 0, exit_code_of(error))

    def _fail(self, error: WorkerDied, *, here: bool) -> None:
        """Makes all ranks of this host raise an error, if it is the first one."""
        if self.has_failed:
            return
        self._failed, self.failed_here = error, here
        self._code = exit_code_of(error)
        if self._owner is not None:
            self._owner.fail(error)
        self._group.abort(error.message)
        self._terminating_at = time.monotonic() + _NEWS_SECONDS

    def _died(self, rank: int, program: OwnedProcess) -> WorkerDied:
        partition = None
        if self._owner is not None:
            self._owner.read()  # its partition may have come just before its end
            partition = self._owner.partitions.get(rank)
        phrase, code, number = describe_exit(program.return_code)
        of = f"partition {partition}, " if partition is not None else ""
        host = self._hosts.names[self._hosts.index]
        on = f" on host {host}" if len(self._hosts.counts) > 1 else ""
        return WorkerDied(
            f"rank {rank} ({of}process {program.process.pid}{on}) {phrase}",
            rank=rank,
            pid=program.process.pid,
            exit_code=code,
            signal=number,
            log_tail=program.last_errors(),
            partition=partition,
        )

    def _hurry(self, running: list[OwnedProcess]) -> None:
        """Stops ranks that have not ended by themselves in time after one has failed."""
        now = time.monotonic()
        if running and self._told_at is not None and now > self._told_at:
            self._told_at = None
            say("the ranks have not ended yet. Ctrl-C again kills them.", sys.stderr)
        if self._terminating_at is not None and now > self._terminating_at:
            self._terminating_at = None
            self._killing_at = now + _TERM_SECONDS
            for program in running:
                program.send_signal(signal.SIGTERM)
        if self._killing_at is not None and now > self._killing_at:
            for program in running:
                program.kill_group()


@contextmanager
def _forwarded(crew: RankCrew) -> Iterator[None]:
    """Forwards SIGINT and SIGTERM to the ranks, which end as the script decides."""

    def forward(number: int, _: Any) -> None:
        crew.send(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(error: WorkerDied) -> int:
    """Returns the exit code of the command whose rank has failed, as shells report it."""
    if error.signal is not None:
        return 128 + error.signal
    return error.exit_code or 1  # a rank lost with its host has none
