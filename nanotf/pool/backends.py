"""The back ends, which start workers, by name.

"local": this process starts them, on this machine. "multiprocessing": BigDL-Nano's name for
"local". "ray": Ray starts them, on this machine or on the nodes of a cluster; see `ray`. A back end
has a kind of plan, which describes the workers, and a kind of crew (`handles.Crew`), which starts
them. The rest of nanotf only uses `Pool`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from nanotf.errors import InvalidArgumentError, UnsupportedVersionError, check_choice
from nanotf.machine import neighbours, topology
from nanotf.pool import zygote
from nanotf.pool.handles import Crew
from nanotf.pool.local import LocalCrew
from nanotf.pool.plans import AnyPlan, RayPlan
from nanotf.pool.ray import cluster
from nanotf.pool.ray.crew import RayCrew

BACKENDS = {"local": "local", "multiprocessing": "local", "ray": "ray"}  # by accepted name
DEFAULT_BACKEND = "local"


def check_backend(backend: str | None) -> str:
    """Returns the back end to use for an argument `backend`: "local" or "ray".

    Args:
        backend: str, one of `BACKENDS`, or None for the default.

    Raises:
        InvalidArgumentError: There is no such back end.
        UnsupportedVersionError: Its package is not installed.
    """
    if backend is None:
        return DEFAULT_BACKEND
    check_choice("backend", backend, tuple(BACKENDS))
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise UnsupportedVersionError(
            "backend='ray' needs the package ray. Received: backend='ray', and ray is not "
            "installed in this Python. Install it: pip install 'nanotf[ray]'."
        )
    return BACKENDS[backend]


def check_can_measure(backend: str | None) -> None:
    """Rejects `num_processes="auto"` if measurements on this machine do not apply to the workers.

    Raises:
        InvalidArgumentError: The workers run through Ray.
    """
    if check_backend(backend) == "ray":
        raise InvalidArgumentError(
            "num_processes='auto' measures on the cores of this machine. Received: backend='ray'. "
            "Pass a number of workers."
        )


def plan(
    backend: str | None,
    num_processes: int,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
) -> AnyPlan:
    """Plans the workers of a call: their number and, for local ones, their cores.

    Args:
        backend: str or None for the default.
        num_processes, cores_per_process, cores: as in `fit`.

    Raises:
        NanoError: An argument cannot be used.
    """
    if check_backend(backend) == "local":
        return neighbours.plan(num_processes, cores_per_process, cores)
    if cores is not None:
        raise InvalidArgumentError(
            "`cores` names logical CPUs of this machine, and with backend='ray' each node chooses "
            f"its own. Received: cores={cores!r}. Pass cores_per_process=... to say how many."
        )
    return RayPlan(
        topology.check_num_processes(num_processes),
        topology.check_cores_per_process(cores_per_process),
    )


def crew_of(plan: AnyPlan, transport: str, key: bytes) -> Crew:
    """Returns the crew that starts the workers of a plan.

    Args:
        plan: `topology.Plan` or `RayPlan`.
        transport: str, one of `transports.TRANSPORTS`.
        key: bytes, the pool's secret key.
    """
    if isinstance(plan, RayPlan):
        return RayCrew(plan, transport, key)
    return LocalCrew(plan, transport, key)


def stop_what_was_started() -> None:
    """Ends the helpers of the back ends: the zygote, and Ray if nanotf started it."""
    zygote.end()
    cluster.stop()
