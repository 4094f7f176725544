"""The actor: starts a worker on its node, and connects it to the parent if that is elsewhere.

Importing this module needs neither Ray nor TensorFlow; `ray_crew` makes an actor of `Relay`. Its
methods run in separate threads, one for each of `CONCURRENCY_GROUPS`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import nanotf
from nanotf.machine import cpus, neighbours, topology
from nanotf.pool import stalls
from nanotf.pool.forks import Zygote
from nanotf.pool.hosts.remote import Key, Said, Twins
from nanotf.pool.local import LocalWorker, worker_variables
from nanotf.wire import timing
from nanotf.wire.channel import ChannelClosed

# One thread each, so that no group waits for another.
CONCURRENCY_GROUPS = {"down": 1, "up": 1, "life": 1, "control": 1}

HANDOVER_BYTES = 32  # length of the token that identifies the worker of a channel
# Variables that Ray sets for its own processes, besides OMP_NUM_THREADS.
RAYS_OWN = ("RAY_", "SPT_NOENV", "PYTHONBREAKPOINT")


@dataclasses.dataclass(frozen=True)
class Started:
    """A relay's message when its worker runs."""

    pid: int  # the worker's
    direct: bool  # True if the parent has the worker's channel itself


class Relay:
    """The actor of one worker."""

    def __init__(self) -> None:
        self._worker: LocalWorker | None = None
        self._twins = Twins(1)
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's; it would limit the plan like the user's

    # ------------------------------------------------------------------------ placement
    def version(self) -> str:
        """Returns the version of nanotf on this node."""
        return nanotf.__version__

    def node(self) -> str:
        """Returns the id of the node on which Ray placed this actor."""
        ray: Any = importlib.import_module("ray")
        return str(ray.get_runtime_context().get_node_id())

    def plan(
        self, count: int, cores_per_process: int | None, part: float, limits: Mapping[str, str]
    ) -> tuple[topology.Placement, ...]:
        """Plans the cores of all workers on this node.

        Args:
            count: the number of workers on this node.
            cores_per_process: None for equal shares.
            part: the part of the node's CPUs that Ray gave to all of them.
            limits: environment variables of the parent that limit the cores; empty if the parent
                is on another node.

        Raises:
            PlacementError: There are not enough cores.
        """
        os.environ.update(limits)
        if cores_per_process is None and part < 1:
            usable = len(cpus.describe_machine().usable_cores())
            cores_per_process = max(1, int(usable * part / count))
        return neighbours.plan(count, cores_per_process).placements

    # ---------------------------------------------------------------------------- start
    def start(
        self,
        placement: topology.Placement,
        key: bytes,
        transport: str,
        environ: Mapping[str, str],
        directory: str,
        handover: tuple[str, bytes] | None,
    ) -> Started:
        """Starts the worker.

        Args:
            placement: its rank and cores.
            key: the pool's secret key.
            environ: variables that it takes over from the parent; all others are the node's.
            directory: the parent's working directory.
            handover: if the parent is on this node: the name of a Unix socket on which it waits
                for the channel, and the token to send there. Else None.
        """
        ours = {k: v for k, v in os.environ.items() if not k.startswith(RAYS_OWN)}
        if os.path.isdir(directory):  # noqa: PTH112, another node may not have it
            os.chdir(directory)
        variables = worker_variables(placement, {**ours, **environ})
        self._zygote = Zygote(variables, imports=False)
        self._worker = worker = LocalWorker(placement, key, transport, variables, self._zygote)
        direct = handover is not None and _hand_over(worker, *handover)
        if not direct:
            reader = threading.Thread(target=self._read, args=(key,), name="nanotf-relay")
            reader.daemon = True
            reader.start()
        return Started(worker.process.pid, direct)

    @property
    def worker(self) -> LocalWorker:
        assert self._worker is not None, "start() comes first"
        return self._worker

    # ----------------------------------------------------------------- parent to worker
    def push(
        self,
        body: bytes,
        new: Sequence[tuple[Key, int]],
        places: Sequence[tuple[Key, int]],
        *data: Any,
    ) -> None:
        """Takes a message from the parent, or a part of the data that precede it.

        Args:
            body: the pickled message; empty if more data follow first.
            new: (key, size in bytes) of blocks to create.
            places: (key, offset), the destinations of the data.
            *data: bytes or arrays of bytes.
        """
        self._twins.create(new)
        for (key, offset), content in zip(places, data, strict=True):
            self._twins.write(key, offset, content)
        if body:
            try:
                self._twins.deliver(pickle.loads(body), self.worker.channel.send)
            except ChannelClosed:
                pass  # the thread that reads the channel reports it

    # ----------------------------------------------------------------- worker to parent
    def _read(self, key: bytes) -> None:
        channel = self.worker.channel
        try:
            channel.show_key_second(key)
            while True:
                self._said.put(self._twins.take(channel.receive(), channel))
        except (EOFError, OSError):
            pass  # the worker has exited
        finally:
            self._said.put(Said())

    def pull(self, seconds: float) -> tuple[list[Said], bool]:
        """Waits for messages of the worker.

        Args:
            seconds: the longest time to wait.

        Returns:
            The messages since the last call, maybe none, and whether a signal has
            stopped the worker.
        """
        self.worker.trim_log()
        found: list[Said] = []
        try:
            found.append(self._said.get(timeout=seconds))
            while True:
                found.append(self._said.get_nowait())
        except queue.Empty:
            return found, stalls.is_stopped(self.worker.process.pid)

    # -------------------------------------------------------------------------- its life
    def wait(self) -> int:
        """Waits for the worker's end; returns its exit code, like `subprocess.Popen.returncode`."""
        return self.worker.process.wait()

    def kill(self) -> None:
        """Kills the worker at once."""
        if self._worker is not None:
            self._worker.process.kill()

    def send_signal(self, signal: int) -> None:
        """Sends the worker a signal."""
        self.worker.process.send_signal(signal)

    def log_tail(self) -> str:
        """Returns the end of the worker's log, see `Worker`."""
        return self.worker.log_tail()

    def stack(self) -> str:
        """Returns the worker's Python stack, see `Worker`."""
        return self.worker.stack()

    def clock(self) -> int:
        """Returns the time of this node's clock, which the worker's times refer to."""
        return timing.now()


def _hand_over(worker: LocalWorker, name: str, token: bytes) -> bool:
    """Sends the parent the worker's channel and log; returns True if that worked.

    It fails if the parent is in another container: containers of a node do not share sockets.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(name)
            socket.send_fds(sock, [token], [worker.channel.fileno(), worker.log.fileno()])
        except OSError:
            return False
    worker.channel.close()  # the worker notices when the last copy of that end is closed
    return True
