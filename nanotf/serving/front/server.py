"""A server, from its start to its end: the loop that holds all of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import uvloop

from nanotf.console import logger, say
from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.machine import time_slices, topology
from nanotf.serving.front.counters import Counters
from nanotf.serving.front.desk import Desk
from nanotf.serving.front.dispatcher import Dispatcher, ServerLimits
from nanotf.serving.front.fleet import Fleet
from nanotf.serving.front.http_connection import HttpConnection
from nanotf.serving.front.incoming import Incoming
from nanotf.serving.front.leftovers import Leftovers
from nanotf.serving.front.wanted_models import WantedModels
from nanotf.serving.interface import Interface, Response
from nanotf.serving.remote.remote_interface import RemoteInterface
from nanotf.serving.repository.added_models import AddedModels
from nanotf.serving.repository.repository import Repository
from nanotf.serving.worker_messages import WorkerOptions
from nanotf.wire import files

if TYPE_CHECKING:
    from nanotf.serving.front.grpc_listener import GrpcListener

_MOST_DESCRIPTORS = 1 << 16
_OWN_DESCRIPTORS = 256  # of workers and models
_BACKLOG = 2048  # connections that wait to be accepted
_TICK = 1.0  # seconds between looks at what is late
_LAST_REQUESTS = 0.5  # seconds for which open connections are read after SIGTERM
_SOON = 0.02  # seconds between looks whether the server may end
_KILLED = 128 + signal.SIGTERM  # the exit code if requests were left without an answer
END_SECONDS = 25.0  # for requests that run at SIGTERM; a container's platform kills after 30


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """The orders for a server."""

    repository: Repository
    added: AddedModels  # one of the repository's catalogs
    interfaces: tuple[Interface, ...]
    plan: topology.Plan
    limits: ServerLimits
    most_bytes: int  # of a request's body
    folder: pathlib.Path  # private, for archives, converted programs and temporary files
    engine: str | None = None  # of `nanotf.inference`
    host: str = "127.0.0.1"
    port: int = 8080  # 0 for any that is free
    grpc_port: int | None = None  # the same, for gRPC; None for no gRPC
    poll: float = 1.0  # seconds between looks for new versions; 0 for none
    start_timeout: float = 300.0  # seconds until each model has a version that is served
    load_timeout: float = 600.0  # seconds that a worker may take to load a version
    drain_delay: float = 0.0  # seconds between SIGTERM and the end of new connections
    ready_file: pathlib.Path | None = None  # gets the port and the process id
    access_log: str | None = None  # "text", "json" or None


class Server:
    """A server in this process. It is made in a running loop.

    Args:
        options: what it is to do.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options, self._now = options, time.monotonic
        self._connections: set[HttpConnection] = set()
        self._counters = Counters()
        self._dispatcher = Dispatcher(options.limits, self._counters)
        work = WorkerOptions(
            (),
            options.interfaces,
            options.engine,
            len(options.plan.placements[0].cores),
            options.folder,
            options.limits.most_rows,
            options.most_bytes,
        )
        on_free, on_lost = self._dispatcher.is_free, self._dispatcher.has_lost
        on_replaced = self._dispatcher.dismiss
        on_kept = Leftovers(options.folder, options.added).keep
        self._fleet = Fleet(
            options.plan, work, on_free, on_lost, on_replaced, on_kept, options.load_timeout
        )
        self._wanted = WantedModels(options.repository, options.added, self._fleet.want)
        self._desk = Desk(
            options.interfaces,
            self._fleet,
            self._dispatcher,
            self._counters,
            self._wanted,
            options.most_bytes,
            _most_connections(),
            options.limits.timeout,
            None if options.access_log is None else _access_log(options.access_log),
        )
        self._counters.gauges |= {
            "nanotf_queue_requests": lambda: self._dispatcher.line.count,
            "nanotf_queue_bytes": lambda: self._dispatcher.line.nbytes,
            "nanotf_workers": lambda: len(self._fleet.workers),
        }
        self._counters.totals["nanotf_worker_restarts_total"] = lambda: self._fleet.restarts
        self._grpc = None if options.grpc_port is None else self._grpc_listener(options.grpc_port)
        self._stops = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT.

        Returns:
            The exit code.

        Raises:
            NanoError: The server cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end)
        listener = await self._listen()
        tasks = [loop.create_task(self._tick())]
        try:
            if self._grpc is not None:
                await self._grpc.start()
            await self._wanted.look_twice()
            tasks.append(loop.create_task(self._poll()))
            started = loop.create_task(self._started(listener))
            tasks.append(started)
            stops = loop.create_task(self._stops.wait())
            await asyncio.wait([started, stops], return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()  # raises if the server could not start
            await stops
            await self._drain(listener)
        finally:
            for task in tasks:
                task.cancel()
            listener.close()
            if self._grpc is not None:
                await self._grpc.stop(0)
            await self._fleet.end()
        return 0 if self._signals < 2 else _KILLED

    # ------------------------------------------------------------------------------------ start
    async def _listen(self) -> asyncio.Server:
        options, loop = self._options, asyncio.get_running_loop()
        try:
            return await loop.create_server(
                lambda: HttpConnection(self._desk, self._connections, self._now),
                options.host,
                options.port,
                backlog=_BACKLOG,
            )
        except (OSError, socket.gaierror) as error:
            raise InvalidArgumentError(
                "The server must be able to listen on its address. Received: "
                f"{options.host}, port {options.port}: {error.strerror or error}. Choose another "
                "--port, or --port 0 for any that is free."
            ) from None

    def _grpc_listener(self, port: int) -> GrpcListener:
        from nanotf.serving.front.grpc_listener import GrpcListener  # the extra `grpc`

        options = self._options
        interfaces = [each for each in options.interfaces if isinstance(each, RemoteInterface)]
        return GrpcListener(
            self._desk, interfaces, options.host, port, options.most_bytes, self._now
        )

    async def _started(self, listener: asyncio.Server) -> None:
        begin = time.monotonic()
        workers = f"{self._fleet.size} worker{'s' if self._fleet.size > 1 else ''}"
        say(f"starts {workers}")
        port = listener.sockets[0].getsockname()[1]
        for model in self._wanted.lasting:
            left = begin + self._options.start_timeout - time.monotonic()
            try:
                why = await asyncio.wait_for(self._fleet.outcome(model), left)
            except asyncio.TimeoutError:
                why = f"no version was whole and loaded within {self._options.start_timeout:g} s"
            if why:
                raise ServerFailed(f"The server cannot serve {model}: {why}")
        if self._options.ready_file is not None:
            ready = {"port": port, "pid": os.getpid()}
            if self._grpc is not None:
                ready["grpc_port"] = self._grpc.port
            await write_ready(self._options.ready_file, ready)
        names = ", ".join(
            f"{model} ({_versions(self._fleet.served(model))})" for model in self._desk.models()
        )
        remote = "" if self._grpc is None else f" (gRPC: port {self._grpc.port})"
        say(
            f"serves {names} on http://{self._options.host}:{port}{remote} with "
            f"{workers}, ready after {time.monotonic() - begin:.1f} s"
        )
        gc.freeze()  # what there is stays: the collector need not look at it again
        self._tell_of_rows()

    def _tell_of_rows(self) -> None:
        for model in self._desk.models():
            for loaded in self._fleet.served(model).values():
                for signature, reason in loaded.kept_together.items():
                    logger.warning(
                        "Requests for %s (%s) are computed one by one: their rows may depend on "
                        "each other: %s.",
                        model,
                        signature,
                        reason,
                    )

    # ----------------------------------------------------------------------------------- always
    async def _poll(self) -> None:
        while self._options.poll:
            await asyncio.sleep(self._options.poll)
            try:
                await self._wanted.look()
            except NanoError as error:  # what is served stays
                logger.warning("%s", error)
            except Exception:
                logger.exception("The models could not be looked at. The server tries again.")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                now = self._now()
                for connection in list(self._connections):
                    connection.check_time(now)
                self._dispatcher.check_time()
                self._fleet.check_time()
                self._dispatcher.drop_unserved(self._desk.refusal_of)
            except Exception:  # the next turn is as important
                logger.exception("The server has made a mistake, and continues.")

    # -------------------------------------------------------------------------------------- end
    def _asked_to_end(self) -> None:
        self._signals += 1
        if self._signals > 2:
            os._exit(_KILLED)  # the workers end with this process
        self._stops.set()

    async def _drain(self, listener: asyncio.Server) -> None:
        """Answers what has come; what comes later, on open connections and by gRPC for a moment."""
        self._desk.is_leaving = True
        delay = self._now() + self._options.drain_delay
        while self._now() < delay and self._signals < 2:
            await asyncio.sleep(_SOON)
        listener.close()
        ends = [] if self._grpc is None else [asyncio.create_task(self._end_calls(self._grpc))]
        begin = self._now()
        while self._signals < 2 and not (self._is_done() and all(task.done() for task in ends)):
            if self._now() > begin + END_SECONDS:
                self._signals = 2  # some requests stay without an answer
            # A request may be on its way on a connection that waits for one.
            if self._now() > begin + _LAST_REQUESTS:
                for connection in list(self._connections):
                    connection.leave()
            await asyncio.sleep(_SOON)

    async def _end_calls(self, listener: GrpcListener) -> None:
        # gRPC cancels a call that has come, but that it has not handed over when it stops.
        await asyncio.sleep(_LAST_REQUESTS)
        await listener.stop(END_SECONDS)

    def _is_done(self) -> bool:
        return self._dispatcher.is_idle and not self._connections


async def write_ready(place: pathlib.Path, ready: dict[str, int]) -> None:
    """Writes the ready file. On a full disk it waits for room, while the server answers.

    Raises:
        OSError: The file cannot be written for another reason.
    """
    is_told = False
    while True:
        try:
            files.write_json(place, ready)
            return
        except OSError as error:
            if error.errno not in files.FULL:
                raise
            if not is_told:
                logger.warning("The ready file waits for room: %s", error)
            is_told = True
        await asyncio.sleep(_TICK)


class ServerFailed(NanoError, RuntimeError):
    """A server could not start."""


def serve(options: ServerOptions) -> int:
    """Serves until this process is asked to end.

    Returns:
        The exit code.

    Raises:
        NanoError: The server cannot start.
    """

    async def run() -> int:
        return await Server(options).run()

    _allow_connections()
    time_slices.run_soon()
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C before the loop handles signals
        return uvloop.run(run())
    return 128 + signal.SIGINT


def _allow_connections() -> None:
    """Raises the number of descriptors as far as this process may: each client needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _most_connections() -> int:
    """Returns how many clients this process has descriptors for, beside its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else max(16, soft - _OWN_DESCRIPTORS)


def _access_log(form: str) -> Any:
    def log(incoming: Incoming, model: str, answer: Response) -> None:
        seconds = time.monotonic() - incoming.began
        entry = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "client": incoming.client,
            "method": incoming.method,
            "path": incoming.path,
            "model": model,
            "status": answer.status,
            "bytes": len(answer.body),
            "ms": round(1000 * seconds, 3),
        }
        line = json.dumps(entry) if form == "json" else _as_text(list(entry.values()))
        with contextlib.suppress(OSError, ValueError):  # a full disk, or nobody who reads
            print(line, file=sys.stderr)

    return log


def _versions(numbers: Iterable[int]) -> str:
    """Returns words for versions."""
    found = [str(number) for number in sorted(numbers)]
    return f"version{'s' if len(found) > 1 else ''} {', '.join(found)}"


def _as_text(values: Sequence[Any]) -> str:
    return " ".join(str(value) or "-" for value in values)
