"""The connection to Ray, and the CPUs of its nodes."""

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

_started: set[str] = set()  # the session that `connect` began, if any


def connect() -> Any:
    """Returns the module `ray`, connected to a cluster.

    If the program has not called `ray.init()`, this connects to the cluster that RAY_ADDRESS names
    or that runs on this machine. If there is none, it starts a Ray on this machine, which `stop`
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
                "forgets a cluster that has ended; or call ray.init(...) first."
            ) from error
    return ray


def _start(ray: Any) -> None:
    if not ray.is_initialized():
        # No dashboard: this Ray is started for one program.
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        _started.add(session(ray))


def _run_in_spawner_thread(function: Callable[[], None]) -> None:
    """Calls a function in a thread that lives as long as this process.

    Linux ends Ray's processes with the *thread* that started them (PR_SET_PDEATHSIG), but Ray must
    outlive the thread that needed it first.
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
    """Disconnects from Ray if `connect` connected to it, which ends a Ray that it started."""
    started = set(_started)
    _started.clear()
    if started:
        ray: Any = importlib.import_module("ray")
        if ray.is_initialized() and session(ray) in started:
            ray.shutdown()


def session(ray: Any) -> str:
    """Returns an identifier of this connection to Ray; job ids alone repeat between clusters."""
    context = ray.get_runtime_context()
    return f"{context.get_job_id()} {context.get_node_id()}"


def cpus_by_node(ray: Any) -> dict[str, int]:
    """Returns the number of Ray's CPUs on each live node, by the node's id."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}


def share(cpus: Sequence[int], size: int, wanted: int | None) -> int:
    """Returns the number of Ray's CPUs that each worker gets.

    Args:
        cpus: of each node that may have workers.
        size: number of workers.
        wanted: the number that each worker must get; None for the largest equal shares.

    Raises:
        PlacementError: There are too few CPUs.
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
