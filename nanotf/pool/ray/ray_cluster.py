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

from nanotf.errors import NanoError, PlacementError, UnsupportedVersionError
from nanotf.pool.hosts.crew import counts_of

OLDEST = (2, 50)  # in which bundles of a placement group go to the nodes that they ask for

_started: set[str] = set()  # the session that `connect` began, if any


def connect() -> Any:
    """Returns the module `ray`, connected to a cluster.

    If the program has not called `ray.init()`, this connects to the cluster that RAY_ADDRESS names
    or that runs on this machine. If there is none, it starts a Ray on this machine, which `stop`
    ends.

    Raises:
        UnsupportedVersionError: This Ray is too old.
        NanoError: Ray cannot be reached or started, or this process is on none of its nodes.
    """
    ray: Any = importlib.import_module("ray")
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        raise UnsupportedVersionError(
            f"backend='ray' needs Ray {OLDEST[0]}.{OLDEST[1]} or later. Received: Ray "
            f"{ray.__version__}. Upgrade it on all nodes: pip install -U 'nanotf[ray]'."
        )
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
    if importlib.import_module("ray.util.client").ray.is_connected():
        raise NanoError(
            "backend='ray' needs a program that runs on a node of the cluster. Received: a "
            "connection through Ray Client (ray://). Submit the program to the cluster: "
            "ray job submit."
        )
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


def divide(
    home: int, others: Sequence[int], size: int, wanted: int | None
) -> tuple[int, list[int]]:
    """Divides the CPUs of a cluster among workers. What fits on this process's node stays there.

    Args:
        home: Ray's CPUs on this process's node, which needs a worker: the first.
        others: those of every other node.
        size: number of workers.
        wanted: the CPUs that each worker must get; None for the largest equal shares.

    Returns:
        The CPUs of each worker, and the number of workers on this process's node and on each of
        the others that are needed, the largest first.

    Raises:
        PlacementError: There are too few CPUs.

    Example:
        >>> divide(4, [4], 3, None), divide(4, [4, 8], 3, 4)
        ((1, [3]), (4, [1, 2]))
    """
    for nodes in ([home], [home, *sorted(others, reverse=True)]):
        for each in range(home, 0, -1) if wanted is None else (wanted,):
            room = [cpus // each for cpus in nodes]
            if room[0] and sum(room) >= size:
                return each, [count for count in counts_of(size, room) if count]
    asked = f"num_processes={size}" + ("" if wanted is None else f", cores_per_process={wanted}")
    raise PlacementError(
        "Every worker needs CPUs of Ray's that are on one node, and the first needs them on this "
        f"process's node. Received: backend='ray', {asked}, {home} CPUs on this process's node, "
        f"and {sorted(others, reverse=True)} on the others. Ask for less, or add nodes before the "
        "call."
    )


def part(count: int, share: int, cpus: int) -> float:
    """Returns the part of a node's cores that its workers get.

    Ray counts logical CPUs, so a share says nothing of cores. A rest of CPUs that is too small for
    another worker belongs to these.

    Args:
        count: number of workers on the node.
        share: Ray's CPUs of each.
        cpus: Ray's CPUs on the node.
    """
    return 1.0 if (count + 1) * share > cpus else count * share / cpus
