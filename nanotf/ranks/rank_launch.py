"""`nanotf run --ranks`: N processes run the script, each as a rank.

    nanotf run --ranks -n 2 train.py
      | owner of the group and of the mailboxes, watches the processes
      +-- rank 0   pinned; its output is this process's
      +-- rank 1   pinned; its output goes to a log (`rank_output`)

A rank that fails fails all: the others raise in their next call that communicates, and are stopped
if they make none. Ranks that wait for each other in unlike collectives fail, too. A rank that waits
for longer than NANOTF_STALL_SECONDS is named in a warning. `rank_process` is the code of a rank's
process.

Sets for each rank, besides a worker's variables: TF_CONFIG, as `MultiWorkerMirroredStrategy` reads
it, and HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE, HOROVOD_CROSS_RANK and
HOROVOD_CROSS_SIZE, as Horovod's launcher does.
"""

from __future__ import annotations

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

from nanotf.console import say
from nanotf.errors import (
    CollectiveError,
    InvalidArgumentError,
    UnavailableError,
    WorkerDied,
    describe_exit,
)
from nanotf.machine import cluster, neighbours, topology
from nanotf.machine.interpreter import python_command
from nanotf.pool.local import worker_variables
from nanotf.pool.stalls import stall_seconds
from nanotf.ranks.rank_order import GroupSeat, RankOrder, RankScript
from nanotf.ranks.rank_output import RankOutput
from nanotf.sagemaker.detached.processes import Output, OwnedProcess
from nanotf.sagemaker.smp import config
from nanotf.sagemaker.smp import rank_groups as places
from nanotf.wire.memory_files import anonymous_file
from nanotf.wire.ports import free_port

if TYPE_CHECKING:
    from nanotf.collectives.spec import GroupOwner
    from nanotf.parent.loop.divergence import DivergenceDetector
    from nanotf.sagemaker.smp.mailboxes.mailbox_owner import MailboxOwner

_POLL_SECONDS = 0.1  # between looks at the processes, without output
_LOOK_SECONDS = 1.0  # between looks at collectives that wait
_NEWS_SECONDS = 5.0  # for the other ranks to raise after one has failed, then SIGTERM
_TERM_SECONDS = 5.0  # from SIGTERM to SIGKILL
_MOMENT_SECONDS = 1.0  # for the ranks to end after Ctrl-C; then a line says that they have not yet


def number(
    flag: bool, num_processes: int | str | None, hosts: str | None, environ: Mapping[str, str]
) -> int | None:
    """Returns the number of ranks that should run a script; None if it runs in this process.

    Ranks run it with `--ranks` or `--smp`, or if `SM_HP_MP_PARAMETERS` asks for several partitions.

    Args:
        flag: True if `--ranks` or `--smp` is given.
        num_processes: the value of `-n`; "auto" and None mean the number of partitions of
            `SM_HP_MP_PARAMETERS`.
        hosts: the value of `--hosts`; None if it is not given.
        environ: environment variables.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: The number is missing, is not divisible by
            the number of partitions, or the configuration breaks a rule.
        UnavailableError: There are several hosts.
    """
    wanted = config.load(None, environ) if config.VARIABLE in environ else None
    if not flag and (wanted is None or wanted.partitions == 1):
        return None
    if num_processes in (None, topology.AUTO) and wanted is not None:
        num_processes = wanted.partitions
    if not isinstance(num_processes, int):
        raise InvalidArgumentError(
            "`nanotf run --ranks` needs the number of processes. Received: "
            f"-n {num_processes}, and no {config.VARIABLE}. Pass -n N; for model parallelism, "
            "divisible by the number of partitions that the script passes to smp.init()."
        )
    size = topology.check_num_processes(num_processes)
    launcher, count = cluster.launched(environ)
    if count > 1:
        raise InvalidArgumentError(
            "`nanotf run --ranks` starts the ranks itself, so it must run once. Received: "
            f"{count} processes that {launcher} has started. Call it without {launcher}, as "
            f"`nanotf run --ranks -n {count}`."
        )
    if wanted is not None:
        places.place(0, size, wanted.partitions)
    found = cluster.find(environ, hosts)
    if found.size > 1:
        raise UnavailableError(
            "The ranks of `nanotf run --ranks` run on one host. Received: the hosts "
            f"{', '.join(found.hosts)} (from {found.source}). Run the command on one of them, "
            "outside the launcher."
        )
    return size


def run(script: RankScript, size: int) -> int:
    """Runs a script in `size` processes.

    Args:
        size: number of ranks.

    Returns:
        0 if all ranks have ended as they should; else the exit code of the first that has not.

    Raises:
        PlacementError: The machine has too few cores.
    """
    # These import NumPy, which the other commands do without.
    from nanotf.collectives.spec import create_group
    from nanotf.parent.loop.divergence import DivergenceDetector
    from nanotf.sagemaker.smp.mailboxes.mailbox_owner import MailboxOwner, supervised

    plan = neighbours.plan(size)
    with ExitStack() as stack:
        logs = RankOutput(size, script.shows_all_ranks)
        stack.callback(logs.close)
        if sys.stderr is not None:  # a line that stays: the terminal is rank 0's from now on
            say(f"starting {size} ranks{logs.about}", sys.stderr)
        owner = MailboxOwner(size, stall_seconds())
        stack.callback(owner.close)
        group = stack.enter_context(create_group(size, deadline=stall_seconds()))
        output = Output(logs.write)
        stack.callback(output.close)
        crew = _Ranks(owner, group, output, DivergenceDetector("the script", size, _SAME_CALLS))
        stack.callback(crew.kill)
        ports = [free_port() for _ in range(size)]
        for placement in plan.placements:
            seat = GroupSeat(group.spec, placement.rank, group.fd)
            order = RankOrder(script, placement, owner.spec(placement.rank), seat)
            crew.start(order, rank_variables(placement.rank, ports))
        stack.enter_context(_forwarded(crew))
        stack.enter_context(supervised(owner))
        crew.watch()
        output.drain()
        logs.failed = crew.has_failed
    return crew.result()


def rank_variables(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Returns the variables by which scripts find their rank.

    Args:
        ports: by rank, a TCP port of the loopback interface that is free now. Ranks open none.
    """
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    size, one_host = len(ports), {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, **one_host}
    return {
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
        **{f"HOROVOD_{name}": str(number) for name, number in numbers.items()},
    }


_SAME_CALLS = (
    "All ranks must make the same collectives, in the same order.",
    "Let no rank skip a step, an epoch or a call of Horovod or tf.distribute that others make.",
)


class _Ranks:
    """The processes of all ranks.

    Args:
        owner: makes their mailboxes; the caller closes it.
        group: of all ranks; the caller closes it.
        output: reads the output of all but the first.
        divergence: detects unlike collectives.
    """

    def __init__(
        self, owner: MailboxOwner, group: GroupOwner, output: Output, divergence: DivergenceDetector
    ) -> None:
        self._owner, self._group, self._output = owner, group, output
        self._divergence = divergence
        self._programs: list[OwnedProcess] = []
        self._ended: set[int] = set()  # ranks that have ended as they should
        self._looking_at = 0.0  # when `_divergence` looks again
        self._failed: WorkerDied | None = None
        self._code = 0
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
        rank, data = order.placement.rank, pickle.dumps(order)
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
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[fd, order.seat.fd, *order.mailbox.fds],
                start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
            )
        finally:
            os.close(fd)
        program = OwnedProcess(str(rank), command, process)
        self._programs.append(program)
        self._owner.release(rank)
        if rank > 0:
            self._output.add(program)

    def watch(self) -> None:
        """Waits until all have ended."""
        running = dict(enumerate(self._programs))
        while running:
            if self._output.is_open:  # not with one rank, or once the others have ended
                self._output.read(_POLL_SECONDS)
            else:
                time.sleep(_POLL_SECONDS)
            for rank, program in list(running.items()):
                if not program.is_running:
                    del running[rank]
                    self._note_end(rank, program)
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
            self._group.abort(str(error))

    def send(self, number: int) -> None:
        """Sends a signal to all. SIGKILL follows: after some seconds, or at a second Ctrl-C."""
        if self._is_interrupted and number == signal.SIGINT:
            for program in self._programs:
                program.kill_group()
            # A signal handler calls this: it may have interrupted another print.
            with suppress(OSError, RuntimeError):
                say("the ranks are killed.", sys.stderr)
            return
        for program in self._programs:
            if program.is_running:
                program.process.send_signal(number)
        self._is_interrupted, now = True, time.monotonic()
        if number == signal.SIGINT:
            self._told_at = now + _MOMENT_SECONDS
        if self._killing_at is None:
            self._killing_at = now + _NEWS_SECONDS + _TERM_SECONDS

    def kill(self) -> None:
        """Kills what is left of the processes and of those that they have started."""
        for program in self._programs:
            program.kill_group()
            program.process.wait()

    def result(self) -> int:
        """Says which rank has failed, if one has. Returns the exit code."""
        if self._failed is not None and not self._is_interrupted:
            say(self._failed.message, sys.stderr)
        return self._code

    def _note_end(self, rank: int, program: OwnedProcess) -> None:
        if program.exit_code == 0:
            self._ended.add(rank)
            self._owner.tell_ended(rank)
        elif self._code == 0:  # later failures follow from the first
            self._code = program.exit_code
            self._failed = self._died(rank, program)
            self._owner.fail(self._failed)
            self._group.abort(self._failed.message)
            self._terminating_at = time.monotonic() + _NEWS_SECONDS

    def _died(self, rank: int, program: OwnedProcess) -> WorkerDied:
        self._owner.read()  # its partition may have come just before its end
        phrase, code, number = describe_exit(program.process.returncode)
        partition = self._owner.partitions.get(rank)
        of = f"partition {partition}, " if partition is not None else ""
        return WorkerDied(
            f"rank {rank} ({of}process {program.process.pid}) {phrase}",
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
                program.terminate()
        if self._killing_at is not None and now > self._killing_at:
            for program in running:
                program.kill_group()


@contextmanager
def _forwarded(crew: _Ranks) -> Iterator[None]:
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
