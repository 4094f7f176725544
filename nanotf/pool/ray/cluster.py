"""The connection to Ray, and what its nodes have."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nanotf.errors import NanoError, PlacementError

_started = ""  # the session that `connect` has begun, if it has


def connect() -> Any:
    """The module `ray`, connected to a cluster.

    Where the program has not called `ray.init()`, this connects to the cluster that RAY_ADDRESS
    names or that runs on this machine, and otherwise starts a Ray of its own here, which `stop`
    ends.

    Raises:
        NanoError: Ray cannot be reached or started.
    """
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        try:
            _run_in_spawner_thread(functools.partial(_start, ray))
        except Exception as error:
            raise NanoError(
                "backend='ray' needs a Ray cluster, or room to start one. Received: "
                f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')!r}, and ray.init() raised "
                f"{type(error).__name__}: {error}. RAY_ADDRESS=local starts one here; `ray stop` "
                "forgets one that has gone; or call ray.init(...) yourself before."
            ) from error
    return ray


def _start(ray: Any) -> None:
    global _started
    if not ray.is_initialized():
        # Nobody looks at a dashboard of a Ray that was started for one program.
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        _started = session(ray)


def _run_in_spawner_thread(function: Callable[[], None]) -> None:
    """Calls a function in a thread that lives as long as this process.

    Linux ends Ray's processes with the *thread* that started them (PR_SET_PDEATHSIG), while Ray
    outlives the thread that happened to need it first.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)
            threading.Event().wait()

    threading.Thread(target=run, name="nanotf-ray", daemon=True).start()
    error = outcome.get()
    if error is not None:
        raise error


def stop() -> None:
    """Disconnects from Ray if `connect` connected, and so ends a Ray that it has started."""
    global _started
    started, _started = _started, ""
    if started:
        ray: Any = importlib.import_module("ray")
        if ray.is_initialized() and session(ray) == started:
            ray.shutdown()


def session(ray: Any) -> str:
    """Returns an identity of this connection to Ray: clusters number their jobs alike."""
    context = ray.get_runtime_context()
    return f"{context.get_job_id()} {context.get_node_id()}"


def cpus_by_node(ray: Any) -> dict[str, int]:
    """Returns how many CPUs Ray has on each node that lives, by the node's id."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}


def share(cpus: Sequence[int], size: int, wanted: int | None) -> int:
    """Returns how many CPUs of Ray's each worker gets.

    Args:
        cpus: sequence of int, CPUs of each node that may have workers.
        size: int, number of workers.
        wanted: int or None for as many as all can have alike.

    Raises:
        PlacementError: There are not so many.
    """
    most = max(cpus, default=0)
    for each in range(most, 0, -1) if wanted is None else (wanted,):
        if sum(count // each for count in cpus) >= size:
            return each
    asked = f"num_processes={size}" + ("" if wanted is None else f", cores_per_process={wanted}")
    raise PlacementError(
        "Every worker needs CPUs of Ray's that are on one node. Received: backend='ray', "
        f"{asked}, and nodes with {sorted(cpus, reverse=True)} CPUs. Ask for less, or add nodes "
        "before the call; with transport='shm' all workers are on this process's node."
    )
