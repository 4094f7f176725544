"""The back ends, which start workers, by name.

"local": this process starts them, on this machine. "multiprocessing": BigDL-Nano's name for
"local". "hosts": the hosts of `nanotf run --hosts` do, and it is the default there; see `hosts`.
"ray": the nodes of a Ray cluster do, as such hosts; see `ray`. A plan describes the workers, and a
crew (`handles.Crew`) starts them. The rest of nanotf only uses `Pool`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence

from nanotf.errors import InvalidArgumentError, UnsupportedVersionError, check_choice
from nanotf.machine import neighbours, topology
from nanotf.pool import forks
from nanotf.pool.handles import Crew
from nanotf.pool.hosts import members
from nanotf.pool.hosts.crew import HostsCrew
from nanotf.pool.local import LocalCrew
from nanotf.pool.plans import AnyPlan, HostsPlan
from nanotf.pool.ray import ray_cluster, ray_hosts
from nanotf.pool.transports import READS

# By accepted name.
BACKENDS = {"local": "local", "multiprocessing": "local", "ray": "ray", "hosts": "hosts"}
DEFAULT_BACKEND = "local"  # where the run has no other hosts


def check_backend(backend: str | None) -> str:
    """Returns the back end to use for an argument `backend`: "local", "ray" or "hosts".

    Args:
        backend: a key of `BACKENDS`; None for "hosts" in a run of several hosts, else
            `DEFAULT_BACKEND`.

    Raises:
        InvalidArgumentError: There is no such back end.
        UnsupportedVersionError: Its package is not installed.
    """
    if backend is None:
        return DEFAULT_BACKEND if members.current is None else "hosts"
    check_choice("backend", backend, tuple(BACKENDS))
    if backend == "hosts" and members.current is None:
        raise InvalidArgumentError(
            "backend='hosts' needs the hosts of a run. Received: backend='hosts', in a process "
            "that `nanotf run --hosts h1:4,h2:4 script.py` has not started. Start it so; the "
            "argument is then the default."
        )
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise UnsupportedVersionError(
            "backend='ray' needs the package ray. Received: backend='ray', and ray is not "
            "installed in this Python. Install it: pip install 'nanotf[ray]'."
        )
    return BACKENDS[backend]


def check_can_measure(backend: str | None) -> None:
    """Rejects `num_processes="auto"` if measurements on this machine do not apply to the workers.

    Raises:
        InvalidArgumentError: The workers run through Ray, or on several hosts.
    """
    found = check_backend(backend)
    if found != "local":
        raise InvalidArgumentError(
            f"num_processes='auto' measures on the cores of this machine. Received: "
            f"backend={found!r}. Pass a number of workers."
        )


def plan(
    backend: str | None,
    num_processes: int,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    avoid: Collection[int] = (),
) -> AnyPlan:
    """Plans the workers of a call: their number and, for local ones, their cores.

    Args:
        backend: as in `check_backend`.
        num_processes, cores_per_process, cores: as in `fit`.
        avoid: the logical CPUs of this process's readers.

    Raises:
        NanoError: An argument cannot be used.
    """
    found = check_backend(backend)
    hosts = members.current
    # What fits on this host needs no other.
    is_local = found == "hosts" and hosts is not None and num_processes <= hosts.workers
    if found == "local" or is_local:
        return neighbours.plan(num_processes, cores_per_process, cores, avoid)
    if cores is not None:
        raise InvalidArgumentError(
            f"`cores` names logical CPUs of this machine, and with backend={found!r} each machine "
            f"chooses its own. Received: cores={cores!r}. Pass cores_per_process=... to say how "
            "many."
        )
    return HostsPlan(
        topology.check_num_processes(num_processes),
        topology.check_cores_per_process(cores_per_process),
        found,
    )


def crew_of(plan: AnyPlan, transport: str, key: bytes) -> Crew:
    """Returns the crew that starts the workers of a plan.

    Args:
        key: the pool's secret key.

    Raises:
        NanoError: The plan's workers cannot use this transport, or its hosts are not there.
    """
    if isinstance(plan, HostsPlan) and plan.backend == "ray":
        return ray_hosts.crew_of(plan, transport, key)
    if transport != READS:  # readers work beside the pool; any other replaces it
        ray_hosts.release()
    if isinstance(plan, HostsPlan):
        assert members.current is not None, "`check_backend` has found it"
        return HostsCrew(members.current, plan, transport, key)
    return LocalCrew(plan, transport, key)


def holds_places_of(plan: AnyPlan) -> bool:
    """Returns True unless the CPUs of a pool's workers are no longer this process's."""
    if isinstance(plan, HostsPlan) and plan.backend == "ray":
        return ray_hosts.holds(plan)
    return True


def stop_what_was_started() -> None:
    """Ends what back ends keep: the zygote, Ray's CPUs, and Ray if nanotf started it."""
    forks.end()
    ray_hosts.release()
    ray_cluster.stop()
