"""The parent's view of one worker that Ray started."""

from __future__ import annotations

import subprocess
from typing import Any

from nanotf.machine import topology
from nanotf.pool.handles import Worker
from nanotf.pool.hosts.remote import LOST
from nanotf.pool.ray import ray_cluster
from nanotf.pool.ray.ray_bridge import describe
from nanotf.pool.worker_log import WorkerLog
from nanotf.wire.channel import Channel

ANSWER_SECONDS = 5.0  # for a relay's answer to a question that needs no waiting


def is_connected(ray: Any, session: str) -> bool:
    """Returns True if this process is still connected to the Ray that started a pool."""
    return bool(ray.is_initialized() and ray_cluster.session(ray) == session)


class RayProcess:
    """Proxy for the process of a worker started by a relay.

    Args:
        ray: the module.
        session: see `ray_cluster.session`.
        relay: the handle of its `Relay`.

    Attributes:
        returncode: int or None, as in `subprocess.Popen`; `LOST` for a worker lost with its actor.
        lost: str, how it was lost with its actor, with Ray's reason; empty if it was not.
    """

    def __init__(self, ray: Any, session: str, relay: Any, pid: int) -> None:
        self._ray, self._session, self._relay = ray, session, relay
        self.pid = pid
        self.returncode: int | None = None
        self.lost = ""
        # One call for the process's whole life; `_look` waits for its result.
        self._end = relay.wait.options(concurrency_group="life").remote()

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        return self._look(0)

    def _look(self, seconds: float) -> int | None:
        if self.returncode is not None:
            return self.returncode
        if not is_connected(self._ray, self._session):
            return self._is_lost("ray.shutdown() was called")
        ready, _ = self._ray.wait([self._end], timeout=seconds)
        if not ready:
            return None
        try:
            found = int(self._ray.get(self._end))
        except self._ray.exceptions.RayError as error:
            return self._is_lost(describe(error))
        self.returncode = found
        return found

    def _is_lost(self, why: str) -> int:
        self.lost, self.returncode = f"with its Ray actor ({why})", LOST
        return LOST

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Without a timeout, kills its actor if that takes too long."""
        found = self._look(ANSWER_SECONDS if timeout is None else timeout)
        if found is not None:
            return found
        if timeout is not None:
            raise subprocess.TimeoutExpired("worker", timeout)
        self._ray.kill(self._relay)
        return self._is_lost("it did not answer")

    def kill(self) -> None:
        """Kills the process at once."""
        self._tell("kill")

    def send_signal(self, sig: int) -> None:
        """Sends the process a signal."""
        self._tell("send_signal", int(sig))

    def _tell(self, method: str, *arguments: Any) -> None:
        if is_connected(self._ray, self._session):
            tell = getattr(self._relay, method).options(concurrency_group="control")
            tell.remote(*arguments)

    def ask(self, method: str, seconds: float = 0.0) -> str:
        """Returns the relay's answer, which may take `seconds`; empty if the relay is gone."""
        if not is_connected(self._ray, self._session):
            return ""
        asked = getattr(self._relay, method).options(concurrency_group="control").remote()
        try:
            return str(self._ray.get(asked, timeout=seconds + ANSWER_SECONDS))
        except (self._ray.exceptions.RayError, TimeoutError):
            return ""


class RayWorker(Worker):
    """A worker on this process's node, started by a relay, whose channel and log are here.

    Args:
        host: the address of its node.
    """

    process: RayProcess

    def __init__(
        self,
        placement: topology.Placement,
        process: RayProcess,
        channel: Channel,
        log: WorkerLog,
        host: str,
    ) -> None:
        self.rank, self.cores = placement.rank, placement.cores
        self.process, self.channel, self.log, self.host = process, channel, log, host

    def how_it_ended(self) -> tuple[str, int | None, int | None]:
        if self.process.lost:
            return f"was lost {self.process.lost}", None, None
        return super().how_it_ended()

    def wait_killed(self) -> None:
        self.process.wait()
