"""Workers of this machine: forked from the zygote, or each with an interpreter of its own."""

from __future__ import annotations

import os
import pathlib
import socket
from collections.abc import Mapping

from nanotf.console import logger
from nanotf.errors import WorkerError
from nanotf.machine import environment, topology
from nanotf.pool import children
from nanotf.pool.handles import Worker
from nanotf.pool.worker_log import WorkerLog
from nanotf.pool.zygote import FORK_SECONDS, Zygote, zygote_for
from nanotf.wire import messages
from nanotf.wire.channel import Channel, ChannelClosed
from nanotf.wire.memory_files import above_standard


class LocalCrew:
    """Workers that are processes of this one, or of its zygote.

    Args:
        plan: `topology.Plan`.
        transport: str, one of `transports.TRANSPORTS`.
        key: bytes, the pool's secret key.
    """

    def __init__(self, plan: topology.Plan, transport: str, key: bytes) -> None:
        self.workers: list[Worker] = []
        self._plan, self._transport, self._key = plan, transport, key

    def start(self) -> None:
        zygote = None
        for placement in self._plan.placements:
            environ = worker_variables(placement, os.environ)
            if placement is self._plan.placements[0]:
                zygote = zygote_for(environ)
            self.workers.append(
                WorkerProcess(placement, self._key, self._transport, environ)
                if zygote is None
                else ForkedWorker(placement, self._key, self._transport, environ, zygote)
            )

    def close(self) -> None:
        pass


class WorkerProcess(Worker):
    """A worker with an interpreter of its own.

    Args:
        placement: `topology.Placement`, its rank and cores.
        key: bytes, the pool's secret key.
        transport: str, one of `transports.TRANSPORTS`.
        environ: mapping, all of its environment variables.
    """

    def __init__(
        self,
        placement: topology.Placement,
        key: bytes,
        transport: str,
        environ: Mapping[str, str],
    ) -> None:
        self.rank, self.cores = placement.rank, placement.cores
        self.log = WorkerLog()
        arguments = (
            str(self.rank),
            ",".join(map(str, placement.cores if placement.pin else ())),
            "" if placement.numa_node is None else str(placement.numa_node),
            transport,
            str(os.getpid()),
        )
        try:
            self.process, self.channel = children.start(
                "nanotf.worker", arguments, environ, key, self.log
            )
        except BaseException:
            self.log.close()
            raise


class ForkedWorker(Worker):
    """A worker that is forked from a process which has imported TensorFlow.

    Args:
        placement, key, transport, environ: as of `WorkerProcess`.
        zygote: `Zygote`.

    Raises:
        WorkerDied: The zygote has ended, as where the import of TensorFlow crashes.
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
        self.log = WorkerLog()
        order = messages.Fork(
            self.rank,
            placement.cores if placement.pin else (),
            tuple(os.sched_getaffinity(0)),
            placement.numa_node,
            transport,
            dict(environ),
            str(pathlib.Path.cwd()),
            key,
        )
        ours, theirs = (
            socket.socket(fileno=above_standard(sock.detach()))
            for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        )
        try:
            self.process = zygote.fork(order, theirs.fileno(), self.log.fileno())
        except BaseException as error:
            ours.close()
            self.log.close()
            self.process, self.log = zygote.process, zygote.log
            if isinstance(error, ChannelClosed):
                raise self.died("starting") from error
            if isinstance(error, TimeoutError):
                raise self.error(
                    WorkerError,
                    "The process that workers are forked from imports TensorFlow within "
                    f"{FORK_SECONDS:g} s. Received: process {zygote.process.pid}, which did not "
                    "answer. It was stopped; the next call starts another.",
                ) from error
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)


def worker_variables(placement: topology.Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a worker."""
    found = environment.worker_environment(placement, environ)
    if placement.rank == 0:  # the same for all
        for warning in found.warnings:
            logger.warning("%s", warning)
        for name, value in found.kept.items():
            logger.info("Workers keep %s=%s, which you have set.", name, value)
    variables = found.apply(environ)
    variables["NANOTF_RANK"] = str(placement.rank)
    return variables
