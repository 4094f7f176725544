"""The hosts of a run: which ones, and which of them is this one.

`find` takes the first of these sources that describes hosts:

1. the flag `nanotf run --hosts h1:4,h2:4`;
2. SageMaker: `input/config/resourceconfig.json` under SAGEMAKER_BASE_DIR (default /opt/ml), else
   SM_HOSTS and SM_CURRENT_HOST;
3. Slurm: the variables of a step, which `srun` sets (SLURM_STEP_NODELIST, SLURM_NODEID,
   SLURM_STEP_TASKS_PER_NODE). A batch script that uses neither `srun` nor `mpirun` runs on one
   host;
4. MPI: `mpirun` tells its processes their number but no names, so mpi4py asks for them;
5. TF_CONFIG, as `tf.distribute` reads it;
6. otherwise this machine alone.

Other variables read: NANOTF_CURRENT_HOST (this host's name in the list, if host names and addresses
do not identify it), NANOTF_HOST_ADDRESSES ("algo-1=10.0.0.4,algo-2=10.0.0.5", for names
that do not resolve).
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanotf.errors import InvalidArgumentError
from nanotf.machine import slurm
from nanotf.machine.interpreter import python_command

AUTO = "auto"
CURRENT_VARIABLE = "NANOTF_CURRENT_HOST"
ADDRESSES_VARIABLE = "NANOTF_HOST_ADDRESSES"
OWN_CODE_VARIABLE = "NANOTF_OWN_EXIT_CODE"  # read by `nanotf run`
THIS_MACHINE = "this machine"
TF_CONFIG_PORT = 8890  # SageMaker's choice for MultiWorkerMirroredStrategy

# Variables with the index of a process among those that a launcher started on its host.
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
# Set by the daemons of `mpirun`, and not by `srun`, whose PMI plugins set PMI_SIZE and others.
MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
_MPI_SECONDS = 60.0  # for `mpi_hosts`, which waits until all processes of `mpirun` run it
_MPI_MODULE = "nanotf.machine.mpi_hosts"


@dataclass(frozen=True)
class Cluster:
    """The hosts of a run.

    Args:
        hosts: tuple of str, their names; the first one runs the script.
        current: str, the name of this host.
        source: str, the source that describes them, such as "Slurm".
        workers: tuple of int or None by host, the number of workers that was asked for there.
        local_rank: int, default 0, the index of this process among those that a launcher started
            here.
        run: str, what the launcher calls this run, the same on all hosts; "" if nothing does.
        launched: tuple of int by host, the number of processes that a launcher has started there;
            empty without a launcher, for one on each host.
    """

    hosts: tuple[str, ...]
    current: str
    source: str
    workers: tuple[int | None, ...]
    local_rank: int = 0
    run: str = ""
    launched: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """Returns the index of this host."""
        return self.hosts.index(self.current)

    @property
    def size(self) -> int:
        """Returns the number of hosts."""
        return len(self.hosts)


# Set by `nanotf run`, whose flag a script cannot see.
_chosen: collections.deque[Cluster | None] = collections.deque([None], maxlen=1)


def choose(found: Cluster) -> None:
    """Makes `cluster` return these hosts in this process."""
    _chosen.append(found)


def cluster() -> Cluster:
    """Returns the hosts of this run: `hosts`, `current`, `rank`, `size` and `source`.

    Returns:
        `Cluster`. Its `rank` is the index of this host, and 0 on the host that runs the script.

    Raises:
        InvalidArgumentError: The environment describes hosts wrongly.

    Example:
        >>> nanotf.cluster().hosts  # doctest: +SKIP
        ('algo-1', 'algo-2')
    """
    return _chosen[-1] or find(os.environ)


def set_tf_config(port: int = TF_CONFIG_PORT) -> None:
    """Sets TF_CONFIG for a script that makes a `MultiWorkerMirroredStrategy` of its own.

    Does nothing if there is one host. Call it before the strategy is made, on every host. Scripts
    that leave the strategy to nanotf do not need it.

    Args:
        port: int, the TCP port of TensorFlow's server on every host, default 8890.
    """
    found = cluster()
    if found.size > 1:
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": [f"{host}:{port}" for host in found.hosts]},
                "task": {"type": "worker", "index": found.rank},
            }
        )


def find(environ: Mapping[str, str], flag: str | None = None) -> Cluster:
    """Returns the hosts of a run, see the top of this module.

    Args:
        flag: the value of `--hosts`; None or "auto" to look at the environment.

    Raises:
        InvalidArgumentError: A source describes hosts wrongly, or this host is not among them.
    """
    local = _first(environ, _LOCAL_RANKS, 0)
    if flag is not None and flag != AUTO:
        names, workers = _parse_flag(flag)
        return Cluster(names, _current(names, environ), "--hosts", workers, local)
    for source in (_from_sagemaker, _from_slurm, _from_mpi, _from_tf_config):
        found = source(environ, local)
        if found is not None:
            return found
    return Cluster((socket.gethostname(),), socket.gethostname(), THIS_MACHINE, (None,))


def launched(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the launcher of this process, and how many processes of this program it has started.

    Unlike `find` it asks no other process.

    Returns:
        The launcher's command, `srun` or `mpirun`, and the number; ("", 1) without either.

    Raises:
        InvalidArgumentError: Slurm's variables have another form.
    """
    nodes, tasks = _read_slurm(environ)
    if nodes:
        return "srun", sum(tasks)
    size = _first(environ, _MPI_SIZES, 1)
    return ("mpirun", size) if size > 1 else ("", 1)


# --------------------------------------------------------------------------------- the flag
def _parse_flag(flag: str) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    names: list[str] = []
    workers: list[int | None] = []
    for item in flag.split(","):
        match = re.fullmatch(r"\s*([^\s:]+|\[[^\]\s]+\])(?::([0-9]+))?\s*", item)
        if match is None or match[2] == "0":
            raise InvalidArgumentError(
                "--hosts takes names with numbers of workers, such as h1:4,h2:4, or names alone. "
                f"Received: --hosts {flag}, of which {item!r} is neither."
            )
        names.append(match[1].strip("[]"))
        workers.append(int(match[2]) if match[2] else None)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            f"--hosts names each host once. Received: {', '.join(twice)} more than once. Write "
            "NAME:N for N workers on one host."
        )
    return tuple(names), tuple(workers)


def _current(hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the host of a list that is this one."""
    given = environ.get(CURRENT_VARIABLE)
    if given is not None:
        if given not in hosts:
            raise InvalidArgumentError(
                f"{CURRENT_VARIABLE} must be one of the hosts. Received: "
                f"{CURRENT_VARIABLE}={given!r}, and the hosts {', '.join(hosts)}."
            )
        return given
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    names |= {environ[v] for v in ("SM_CURRENT_HOST", "SLURMD_NODENAME") if v in environ}
    # A list of one host leaves nothing to tell apart.
    found = [host for host in hosts if host in names or len(hosts) == 1]
    if not found:
        mine = _own_addresses()
        found = [host for host in hosts if _resolved(host, environ) in mine]
    if len(found) == 1:
        return found[0]
    raise InvalidArgumentError(
        "This host must be one of the hosts of the run. Received: the hosts "
        f"{', '.join(hosts)}, of which {' and '.join(found) or 'none'} has a name or address of "
        f"{socket.gethostname()}. Set {CURRENT_VARIABLE} on each host to its name in the list."
    )


def _own_addresses() -> set[str]:
    import psutil

    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def _resolved(host: str, environ: Mapping[str, str]) -> str | None:
    try:
        return socket.gethostbyname(address_of(host, environ))
    except OSError:
        return None


def address_of(host: str, environ: Mapping[str, str]) -> str:
    """Returns the address of a host in NANOTF_HOST_ADDRESSES, or its name, for DNS to resolve.

    Raises:
        InvalidArgumentError: The variable has another form.
    """
    text = environ.get(ADDRESSES_VARIABLE, "")
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if any(not (name.strip() and equals and address.strip()) for name, equals, address in pairs):
        raise InvalidArgumentError(
            f"{ADDRESSES_VARIABLE} has the form NAME=ADDRESS,NAME=ADDRESS. Received: {text!r}."
        )
    return {name.strip(): address.strip() for name, _, address in pairs}.get(host, host)


# -------------------------------------------------------------------------------- SageMaker
def _from_sagemaker(environ: Mapping[str, str], local: int) -> Cluster | None:
    base = pathlib.Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    path = base / "input" / "config" / "resourceconfig.json"
    if path.is_file():
        source = str(path)
        try:
            config = json.loads(path.read_text())
            hosts, current = config["hosts"], config["current_host"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _wrong(source, f"{type(error).__name__}: {error}") from error
    elif "SM_HOSTS" in environ:
        source = "SM_HOSTS"
        try:
            hosts, current = json.loads(environ["SM_HOSTS"]), environ["SM_CURRENT_HOST"]
        except (ValueError, KeyError, RecursionError) as error:
            raise _wrong(source, f"{type(error).__name__}: {error}") from error
    else:
        return None
    if not isinstance(hosts, list) or not hosts or current not in hosts:
        raise _wrong(source, f"hosts={hosts!r}, current_host={current!r}")
    # In one order on all hosts: a host's rank is its index.
    names = tuple(sorted(map(str, hosts)))
    run = environ.get("TRAINING_JOB_ARN") or environ.get("TRAINING_JOB_NAME") or ""
    return Cluster(names, str(current), source, (None,) * len(names), local, run)


def _wrong(source: str, received: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{source} must name the hosts of this run and the current one. Received: {received}. "
        "Correct it, or pass --hosts."
    )


# ------------------------------------------------------------------------------------ Slurm
def _from_slurm(environ: Mapping[str, str], local: int) -> Cluster | None:
    hosts, tasks = _read_slurm(environ)
    if not hosts:
        return None
    try:
        current = hosts[int(environ["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError) as error:
        raise _wrong("Slurm's step", _of_slurm(environ)) from error
    names = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    run = ".".join(names) if all(names) else ""
    return Cluster(hosts, current, "Slurm", _asked(tasks), local, run, tuple(tasks))


def _asked(counts: Sequence[int]) -> tuple[int | None, ...]:
    """Returns the workers that processes of a launcher ask for, by host.

    One process on each host, the default of `srun`, says nothing about workers.
    """
    return (None,) * len(counts) if max(counts) == 1 else tuple(counts)


def _read_slurm(environ: Mapping[str, str]) -> tuple[tuple[str, ...], list[int]]:
    """Returns the nodes of a step of Slurm, and the number of tasks on each; none without one.

    `mpirun` in a batch script starts its daemons in a step that misses the node of `mpirun` itself.
    """
    text = environ.get("SLURM_STEP_NODELIST")
    if text is None or any(name in environ for name in MPIRUN):
        return (), []
    try:
        nodes = slurm.expand_nodes(text)
        return nodes, slurm.expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE"), len(nodes))
    except ValueError as error:
        raise _wrong("Slurm's step", _of_slurm(environ)) from error


def _of_slurm(environ: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    return ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)


# -------------------------------------------------------------------------------------- MPI
def _from_mpi(environ: Mapping[str, str], local: int) -> Cluster | None:
    size = _first(environ, _MPI_SIZES, 1)
    here = _first(environ, _MPI_LOCAL_SIZES, 1)
    if size == 1:
        return None
    if here == size:  # one host, so that mpi4py need not be asked for names
        name = socket.gethostname()
        run = environ.get("PMIX_NAMESPACE", "")
        return Cluster((name,), name, "MPI", (size,), local, run, (size,))
    names, rank, run = _ask_mpi(size)
    hosts = tuple(dict.fromkeys(names))
    tasks = [names.count(host) for host in hosts]
    return Cluster(hosts, names[rank], "MPI", _asked(tasks), local, run, tuple(tasks))


def _first(environ: Mapping[str, str], names: Sequence[str], default: int) -> int:
    """Returns the number in the first of these variables that is set."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise InvalidArgumentError(
            f"{name} must be a number, of processes or of one among them. Received: "
            f"{name}={environ[name]!r}. Correct or unset it."
        ) from None


def _ask_mpi(size: int) -> tuple[list[str], int, str]:
    """Returns the host of each process of `mpirun`, this process's rank, and a name of the run.

    In a process of its own, since MPI must not be in one that starts others.
    """
    try:
        asked = subprocess.run(
            python_command(_MPI_MODULE),
            capture_output=True,
            text=True,
            timeout=_MPI_SECONDS,
            check=True,
        )
        names, rank, run = json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise InvalidArgumentError(
            f"mpirun gives its processes no names of hosts, and mpi4py, which asks for them, did "
            f"not run. Received: {size} processes, and {''.join(told)}. Install mpi4py on all "
            "hosts, or pass --hosts h1:4,h2:4."
        ) from error
    return names, rank, run


# -------------------------------------------------------------------------------- TF_CONFIG
def _from_tf_config(environ: Mapping[str, str], local: int) -> Cluster | None:
    text = environ.get("TF_CONFIG")
    if not text:
        return None
    try:
        config: Any = json.loads(text)
        if not config.get("cluster"):
            return None
        tasks = [
            (kind, index, str(address).rpartition(":")[0] or str(address))
            for kind in ("chief", "worker")
            for index, address in enumerate(config["cluster"].get(kind, ()))
        ]
        kind, index = config["task"]["type"], int(config["task"]["index"])
        place = next(i for i, task in enumerate(tasks) if task[:2] == (kind, index))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StopIteration,
        RecursionError,
    ) as error:
        raise _wrong("TF_CONFIG", text) from error
    hosts = tuple(dict.fromkeys(task[2] for task in tasks))
    counts = [sum(task[2] == host for task in tasks) for host in hosts]
    here = tasks[place][2]
    # Several tasks may be on one host, and no launcher has numbered them.
    before = sum(task[2] == here for task in tasks[:place])
    run = json.dumps(config["cluster"], sort_keys=True)  # with the ports of this run
    return Cluster(hosts, here, "TF_CONFIG", _asked(counts), max(local, before), run)
