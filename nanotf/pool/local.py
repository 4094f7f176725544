"""Workers on this machine, forked from a zygote."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping

from nanotf.compat.versions import keras_module_name
from nanotf.console import logger
from nanotf.errors import WorkerDied, WorkerError
from nanotf.machine import environment, topology
from nanotf.pool import forks, stalls
from nanotf.pool.forks import FORK_SECONDS, Forks, Zygote
from nanotf.pool.handles import Worker
from nanotf.pool.transports import READS
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire import messages
from nanotf.wire.channel import Channel, ChannelClosed, socket_pair

_NO_PROCESS = (errno.EAGAIN, errno.ENOMEM)


class LocalCrew:
    """Workers on this machine. They share a zygote, or each has its own.

    Args:
        key: the pool's secret key.
        environ: what workers get in place of this process's environment; None for that.

    Attributes:
        here: `topology.Plan`, the plan.
    """

    hosts = None

    def __init__(
        self,
        plan: topology.Plan,
        transport: str,
        key: bytes,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.workers: list[Worker] = []
        self.here, self._transport, self._key = plan, transport, key
        self.deadline = stalls.stall_seconds()
        self._environ = os.environ if environ is None else environ
        self._forks = Forks()

    def start(self) -> None:
        placements = self.here.placements
        environs = [worker_variables(placement, self._environ) for placement in placements]
        for placement, environ in zip(placements, environs, strict=True):
            self.workers.append(self._started(placement, environ))

    def replace(self, rank: int) -> Worker:
        """Starts a worker on the cores of one that has ended; returns it."""
        self.workers[rank] = self._started_on(self.here.placements[rank])
        return self.workers[rank]

    def add(self, placement: topology.Placement) -> Worker:
        """Starts one more worker; returns it."""
        self.workers.append(self._started_on(placement))
        self.here = topology.Plan((*self.here.placements, placement))
        return self.workers[-1]

    def _started_on(self, placement: topology.Placement) -> Worker:
        return self._started(placement, worker_variables(placement, self._environ))

    def _started(self, placement: topology.Placement, environ: Mapping[str, str]) -> Worker:
        zygote = self._forks.zygote(environ)
        return LocalWorker(placement, self._key, self._transport, environ, zygote)

    def take_connections(self, rank: int) -> list[int]:
        return []

    def close(self) -> None:
        self._forks.close()


class LocalWorker(Worker):
    """A worker forked from a zygote.

    Args:
        key: the pool's secret key.
        transport: one of `transports.TRANSPORTS`, `NO_TRANSPORT` or `READS`.
        environ: all of its environment variables.

    Raises:
        WorkerDied: The zygote has ended, for example because importing TensorFlow crashed;
            or the kernel allows no further process.
        WorkerError: The zygote has not answered within `FORK_SECONDS`.
    """

    def __init__(
        self,
        placement: topology.Placement,
        key: bytes,
        transport: str,
        environ: Mapping[str, str],
        zygote: Zygote,
    ) -> None:
        self.rank, self.cores = placement.rank, placement.cores
        self.title, kind = ("Reader", "reader") if transport == READS else ("Worker", "rank")
        order = messages.Fork(
            self.rank,
            placement.cores if placement.pin else (),
            _usable_cores(),
            placement.numa_node,
            transport,
            dict(environ),
            key,
        )
        with contextlib.ExitStack() as of_failure, contextlib.ExitStack() as of_start:
            self.log = WorkerLog(name=f"{kind}-{self.rank}.log")
            of_failure.callback(self.log.close)
            ours, theirs = socket_pair()
            of_failure.enter_context(ours)
            of_start.enter_context(theirs)
            # A descriptor, not a name: the directory may have been deleted.
            directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            of_start.callback(os.close, directory)
            fds = (theirs.fileno(), self.log.fileno(), directory)
            self._fork(zygote, order, fds)
            of_failure.pop_all()
        self.channel = Channel(ours)

    def _fork(self, zygote: Zygote, order: messages.Fork, fds: tuple[int, ...]) -> None:
        try:
            self.process = zygote.fork(order, fds)
        except BaseException as error:
            self.process, self.log = zygote.process, zygote.log  # errors quote its output
            if isinstance(error, ChannelClosed):
                raise self.died("starting") from error
            if isinstance(error, OSError) and error.errno in _NO_PROCESS:
                raise self.error(
                    WorkerDied,
                    f"{self.title} {self.rank} must be a process of its own. Received: "
                    f"{error.strerror}, when it was to be forked. Raise the limit of processes "
                    "(`ulimit -u`, the container's), or free memory.",
                ) from error
            if isinstance(error, TimeoutError):
                raise self.error(
                    WorkerError,
                    "The process that workers are forked from imports TensorFlow within "
                    f"{FORK_SECONDS:g} s. Received: process {zygote.process.pid}, which did not "
                    "answer. It was stopped; the next call starts another.",
                ) from error
            raise


def begin_here() -> None:
    """Imports TensorFlow and Keras, and forks the zygote from this process, if that is possible.

    For a program that has done nothing yet. In any other, the first workers start a zygote.
    """
    placement = topology.Placement(0, (), pin=False)  # what libraries load is the same for all
    environ = environment.worker_environment(placement, os.environ).apply(os.environ)
    if forks.may_fork_here(environ):
        keras_module_name()
        from nanotf.compat import eager_context  # imports TensorFlow

        if not eager_context.has_begun():
            forks.fork_here(environ)


def worker_variables(placement: topology.Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of a worker."""
    found = environment.worker_environment(placement, environ)
    if placement.rank == 0:  # the same for all
        for warning in found.warnings:
            logger.warning("%s", warning)
        for name, value in found.kept.items():
            logger.info("Workers keep %s=%s, which you have set.", name, value)
    variables = found.apply(environ)
    variables["NANOTF_RANK"] = str(placement.rank)
    return variables


def _usable_cores() -> tuple[int, ...]:
    return tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
