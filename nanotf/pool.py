"""The pool: start, supervise, reuse and stop the workers.

    parent process                                   worker process (one per rank)
      Pool.start                                       python -m nanotf.worker
        socketpair, secret key on stdin      ---->     pins itself, then imports TensorFlow
        one thread per worker reads its channel        one thread reads the channel
        and puts what it says into `Pool._inbox`       and ends the process when it closes

The channel is a Unix socket pair that only the two processes hold: it has no name that
somebody else could open, or that could stay behind. A worker's output goes to an anonymous
file, whose end stands in the error when the worker dies. When the parent goes, in whatever
way, the kernel closes its end, and each worker ends itself.

Locks: `_lock` (module) guards the current pool; a pool's own state belongs to the thread that
runs the job, which holds `Pool.busy`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import pathlib
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf import collectives, environment, messages, topology
from nanotf.channel import Channel, ChannelClosed
from nanotf.errors import NanoError, WorkerDied, WorkerError, describe_exit
from nanotf.shipping.blocks import Block
from nanotf.transports import check_transport

START_SECONDS = 300.0  # importing TensorFlow from a cold network file system takes minutes
STOP_SECONDS = 2.0
IDLE_SECONDS = 600.0
START_TRIES = 3  # a port that was free may be taken before TensorFlow binds it
LOG_TAIL_LINES = 20

logger = logging.getLogger("nanotf")


class _Gone:
    """In the inbox: the worker's channel has closed."""


class Worker:
    """The parent's view of one worker.

    Args:
        placement: `topology.Placement`, its rank and cores.
        variables: dict of str to str, its environment.
        key: bytes, the pool's secret key.
    """

    def __init__(self, placement: topology.Placement, variables: dict[str, str], key: bytes) -> None:
        self.rank = placement.rank
        self.cores = placement.cores
        self.stopping = False  # set by the parent before it asks the worker to end
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "nanotf.worker", str(theirs.fileno()), str(self.rank)]
        pinned = placement.cores if placement.pin else ()
        command.append(",".join(map(str, pinned)))
        command.append("" if placement.numa_node is None else str(placement.numa_node))
        try:
            # A session of its own: Ctrl-C in the terminal is for the parent to handle.
            self.process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.channel = Channel(ours)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died already; the channel will tell
            self.process.stdin.write(key)
            self.process.stdin.close()

    def log_tail(self) -> str:
        """The last lines that the worker printed."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 65536))
        lines = self.log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def died(self, doing: str) -> WorkerDied:
        """The error that says how the worker ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_SECONDS)
        how, exit_code, signal = describe_exit(self.process.returncode)
        return WorkerDied(
            f"Worker {self.rank} (pid {self.process.pid}, cores {list(self.cores)}) {how} "
            f"while {doing}. The other workers were stopped; the next call starts new ones.",
            rank=self.rank,
            pid=self.process.pid,
            cores=self.cores,
            exit_code=exit_code,
            signal=signal,
            log_tail=self.log_tail(),
        )


class Pool:
    """N live workers.

    Args:
        plan: `topology.Plan`.
        transport: str, how workers exchange gradients.

    Raises:
        WorkerDied: A worker ended before it was ready.
        WorkerError: A worker could not set up its strategy.
    """

    def __init__(self, plan: topology.Plan, transport: str) -> None:
        self.plan = plan
        self.transport = transport
        self.size = len(plan.placements)
        self.owner = os.getpid()
        self.busy = threading.Lock()
        self.usable = True
        self.workers: list[Worker] = []
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._jobs = 0
        self.group: collectives.GroupOwner | None = None
        key = secrets.token_bytes(32)
        try:
            for placement in plan.placements:
                self.workers.append(Worker(placement, _variables(placement), key))
            for worker in self.workers:
                self._greet(worker, key)
            self._set_up()
        except BaseException:
            self.kill()
            raise
        for worker in self.workers:
            threading.Thread(
                target=self._read, args=(worker,), name=f"nanotf-{worker.rank}", daemon=True
            ).start()

    # ------------------------------------------------------------------------- starting
    def _greet(self, worker: Worker, key: bytes) -> None:
        try:
            worker.channel.show_key_first(key)
        except (EOFError, OSError) as error:
            raise worker.died("starting") from error

    def _expect(self, worker: Worker, kind: type, doing: str, deadline: float) -> Any:
        while not worker.channel.poll(0.2):
            if worker.process.poll() is not None:
                raise worker.died(doing)
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"Worker {worker.rank} did not finish {doing} within {START_SECONDS:.0f} s.",
                    rank=worker.rank,
                    pid=worker.process.pid,
                    cores=worker.cores,
                    log_tail=worker.log_tail(),
                )
        try:
            message = worker.channel.receive()
        except ChannelClosed as error:
            raise worker.died(doing) from error
        if isinstance(message, messages.SetupFailed):
            raise _SetupError(message, worker)
        assert isinstance(message, kind), message
        return message

    def _set_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        hellos = [self._expect(w, messages.Hello, "starting", deadline) for w in self.workers]
        for worker, hello in zip(self.workers, hellos, strict=True):
            for warning in hello.warnings:
                logger.warning("Worker %d: %s", worker.rank, warning)
        setup = messages.Setup(
            sys_path=tuple(sys.path), argv=tuple(sys.argv), size=self.size
        )
        fds = []
        if self.transport == "grpc":
            cluster = tuple(f"127.0.0.1:{hello.port}" for hello in hellos)
            setup = dataclasses.replace(setup, cluster=cluster)
        else:
            self.group = collectives.create_group(self.size)
            setup = dataclasses.replace(setup, group=self.group.spec)
            fds = [self.group.fd]
        for worker in self.workers:
            worker.channel.send(setup, fds)
        for worker in self.workers:
            self._expect(worker, messages.Ready, "importing TensorFlow", deadline)

    # ----------------------------------------------------------------------- talking
    def _read(self, worker: Worker) -> None:
        try:
            while True:
                self._inbox.put((worker.rank, worker.channel.receive()))
        except ChannelClosed:
            self._inbox.put((worker.rank, _Gone()))

    def send(self, message: messages.Message, blocks: Sequence[Block] = ()) -> None:
        """Sends a message, and the descriptors of shared blocks, to all workers.

        A worker that has gone is not noticed here but by `receive`.
        """
        for worker in self.workers:
            with contextlib.suppress(ChannelClosed):
                worker.channel.send(message, [block.fd for block in blocks])

    def receive(self, timeout: float | None = None) -> tuple[int, Any]:
        """Waits for the next message of any worker.

        Args:
            timeout: float or None, seconds.

        Returns:
            A tuple of the rank and the message.

        Raises:
            WorkerDied: A worker has gone. The pool is not usable any more.
            queue.Empty: The timeout has passed.
        """
        rank, message = self._inbox.get(timeout=timeout)
        if isinstance(message, _Gone):
            self.usable = False
            raise self.workers[rank].died("a job ran")
        return rank, message

    def post(self, message: Any) -> None:
        """Puts a message of the parent's own threads into the inbox, as of rank -1."""
        self._inbox.put((-1, message))

    def next_job(self) -> int:
        """A new job number."""
        self._jobs += 1
        return self._jobs

    # ----------------------------------------------------------------------- ending
    def is_alive(self) -> bool:
        """Whether all workers run and the pool can take a job."""
        return self.usable and all(w.process.poll() is None for w in self.workers)

    def close(self) -> None:
        """Asks the workers to end, and ends those that do not."""
        if self.owner != os.getpid():  # after a fork, the workers belong to the parent
            return
        self.usable = False
        for worker in self.workers:
            worker.stopping = True
        self.send(messages.Stop())
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the workers at once."""
        if self.owner != os.getpid():
            return
        self.usable = False
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.channel.close()
            worker.log.close()
        if self.group is not None:
            self.group.close()


class _SetupError(WorkerError):
    """A worker could not make its strategy; `retry` says whether new ports may help."""

    def __init__(self, message: messages.SetupFailed, worker: Worker) -> None:
        super().__init__(
            f"Worker {message.rank} could not set up its strategy: {message.summary}",
            rank=message.rank,
            pid=worker.process.pid,
            cores=worker.cores,
            remote_traceback=message.traceback,
            log_tail=worker.log_tail(),
        )
        self.retry = message.retry


def _variables(placement: topology.Placement) -> dict[str, str]:
    """The whole environment of a worker."""
    found = environment.worker_environment(placement, os.environ)
    if placement.rank == 0:  # the same for all
        for warning in found.warnings:
            logger.warning("%s", warning)
        for name, value in found.kept.items():
            logger.info("Workers keep %s=%s, which you have set.", name, value)
    variables = found.apply(os.environ)
    variables["NANOTF_RANK"] = str(placement.rank)
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    paths = [p for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root not in paths:
        variables["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return variables


# -------------------------------------------------------------- the pool of this process
_lock = threading.RLock()
_pool: Pool | None = None
_idle_timer: threading.Timer | None = None


@contextlib.contextmanager
def pool_for(plan: topology.Plan, transport: str) -> Iterator[Pool]:
    """Lends the warm pool, or a new one where plan or transport differ or a worker died.

    There is one pool per process, since its workers own the cores. A second thread waits
    until the first has ended its job.
    """
    _stop_idle_timer()
    with _lock:
        pool = _current(plan, transport)
        try:
            yield pool
        except BaseException:
            # What a job left unfinished would answer the next one.
            if not pool.is_alive():
                shutdown()
            raise
        finally:
            _start_idle_timer()


def _current(plan: topology.Plan, transport: str) -> Pool:
    global _pool
    if _pool is not None and _pool.owner != os.getpid():
        _pool = None  # forked: the workers are the other process's
    if _pool is not None and (
        (_pool.plan, _pool.transport) != (plan, transport) or not _pool.is_alive()
    ):
        shutdown()
    if _pool is None:
        _pool = _start(plan, transport)
    return _pool


def _start(plan: topology.Plan, transport: str) -> Pool:
    for attempt in range(START_TRIES):
        try:
            return Pool(plan, transport)
        except _SetupError as error:
            if not error.retry or attempt == START_TRIES - 1:
                raise
            logger.info("Starting the workers again with other ports: %s", error.message)
    raise AssertionError("unreachable")


def warm_up(
    num_processes: int, cores_per_process: int | None = None, transport: str | None = None
) -> None:
    """Starts the workers in the background, while the caller goes on.

    A worker needs some seconds to import TensorFlow; called at the top of a script, this hides
    them behind what the script does before its first `fit(num_processes=...)`, which waits for
    the rest. An error in starting is raised by that `fit`.

    Args:
        num_processes, cores_per_process, transport: as in `fit`; the pool is used by a `fit`
            with the same ones.

    Raises:
        NanoError: An argument cannot be used.
    """
    transport = check_transport(transport)
    plan = topology.plan(num_processes, cores_per_process)

    def start() -> None:
        with _lock:
            if _pool is None or not _pool.is_alive():
                with contextlib.suppress(NanoError):
                    _current(plan, transport)
                _start_idle_timer()

    threading.Thread(target=start, name="nanotf-warm-up", daemon=True).start()


def shutdown() -> None:
    """Ends the workers of this process, if there are any. The next job starts new ones."""
    global _pool
    _stop_idle_timer()
    with _lock:
        pool, _pool = _pool, None
        if pool is not None:
            pool.close()


def _stop_idle_timer() -> None:
    global _idle_timer
    timer, _idle_timer = _idle_timer, None
    if timer is not None:
        timer.cancel()


def _start_idle_timer() -> None:
    global _idle_timer
    _stop_idle_timer()
    _idle_timer = threading.Timer(idle_seconds(), _close_if_idle)
    _idle_timer.daemon = True
    _idle_timer.start()


def _close_if_idle() -> None:
    if _lock.acquire(blocking=False):  # held by a job that has just begun
        try:
            shutdown()
        finally:
            _lock.release()


def idle_seconds() -> float:
    """How long a warm pool waits for the next job: NANOTF_IDLE_SECONDS, 600 by default.

    Raises:
        NanoError: The variable is not a number above 0.
    """
    text = os.environ.get("NANOTF_IDLE_SECONDS", str(IDLE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise NanoError(
            "NANOTF_IDLE_SECONDS must be a number of seconds above 0. "
            f"Received: NANOTF_IDLE_SECONDS={text!r}. Set another, or unset it."
        )
    return seconds


def worker_pids() -> tuple[int, ...]:
    """The process ids of the live workers, by rank; empty when there is no pool."""
    pool = _pool
    if pool is None or pool.owner != os.getpid():
        return ()
    return tuple(worker.process.pid for worker in pool.workers)


atexit.register(shutdown)
