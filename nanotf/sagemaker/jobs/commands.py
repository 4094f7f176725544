"""The commands and variables of a job's programs: the script on each host, and feeders.

Sets for the script: the variables of `script_variables`; PYTHONPATH, from the code to the aliases;
PYTHONUNBUFFERED; NANOTF_WORKER_LOGS; with several hosts NANOTF_HOST_ADDRESSES, NANOTF_PORT and
NANOTF_SECRET and NANOTF_OWN_EXIT_CODE. The user's own `environment` of the request wins.
"""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import sysconfig
from collections.abc import Iterator, Mapping, Sequence

import nanotf
from nanotf.machine import processes, topology
from nanotf.machine.cluster import OWN_CODE_VARIABLE
from nanotf.machine.interpreter import python_command
from nanotf.machine.processes import OwnedProcess
from nanotf.sagemaker.jobs import script_variables, source
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.script_variables import Counts
from nanotf.sagemaker.jobs.simulated_hosts import SimulatedHost, bound, divide
from nanotf.sagemaker.jobs.tree import CONTAINER_BASE, Tree
from nanotf.wire.ports import free_port

# In SageMaker's containers, hosts derive their secret and their address from these. The other hosts
# of `--hosts` are outside the job: they have another secret, and perhaps another interface.
_OF_CONTAINERS = ("TRAINING_JOB_ARN", "SM_NETWORK_INTERFACE_NAME")


def begin(
    job: JobFolder,
    request: JobRequest,
    python: str,
    feeders: Sequence[Sequence[str]],
    places: Mapping[str, Mapping[str, str]],
) -> Iterator[OwnedProcess]:
    """Starts a job's programs, feeders first, and yields each at once.

    Args:
        job: its trees are filled.
        python: the interpreter of the script.
        feeders: a module and its arguments, for each channel in Pipe mode.
        places: as `container_base.provided` yields them.
    """
    hosts = request.host_names
    first = str(job.tree(hosts[0]).base)
    for feeder in feeders:
        command = python_command(*feeder)
        program = processes.begin(command, hosts[0], first, os.environ, is_helper=True)
        program.command = ["python", "-m", *feeder]  # python_command's is too long for a message
        yield program
    parts = host_parts(request)
    # Once for all hosts: they must agree on the port and the secret.
    gpus, shared = script_variables.count_gpus(), variables_of_hosts(request)
    for host, part in zip(hosts, parts, strict=True):
        counts = Counts(part.cores, gpus)
        code = job.tree(host).code
        seen = None if host not in places else Tree(pathlib.Path(CONTAINER_BASE))
        environ = {**os.environ, **variables(job, request, host, counts, seen), **shared}
        # From the variable, since a script may read that instead: both are the same.
        arguments = json.loads(environ["SM_USER_ARGS"])
        words = source.command(request.source.entry, code, python, arguments, run_options(request))
        program_environ = script_variables.with_present_names(environ | request.environment)
        with bound(part):
            program = processes.begin(
                words, host, str(code), program_environ, places=places.get(host)
            )
        program.command = source.shown(words)
        yield program


def host_parts(request: JobRequest) -> list[SimulatedHost]:
    """Returns the cores of each host of a job."""
    number = request.num_processes
    # With "auto", each `fit` chooses a number among the cores that its host has.
    workers = 1 if number in (None, topology.AUTO) else int(number or 1)
    return divide(request.instances, workers, topology.describe_machine())


def variables(
    job: JobFolder, request: JobRequest, host: str, counts: Counts, seen: Tree | None = None
) -> dict[str, str]:
    """Returns the variables of a host's script.

    Args:
        seen: as for `script_variables.variables`.
    """
    tree = job.tree(host)
    found = script_variables.variables(tree, request.name, counts, seen)
    if request.hosts is not None:
        for name in _OF_CONTAINERS:
            del found[name]
    return found | {
        "PYTHONPATH": python_path(tree.code, job.aliases),
        "PYTHONUNBUFFERED": "1",  # into a pipe, Python would hold lines back, and metrics with them
        "NANOTF_WORKER_LOGS": str(job.worker_logs(host)),
    }


def run_options(request: JobRequest) -> list[str] | None:
    """Returns the options of `nanotf run`, or None if plain Python runs the script."""
    options = ["--ranks"] if request.ranks else []
    options += [] if request.num_processes is None else ["-n", request.num_processes]
    if request.hosts is not None:
        options += ["--hosts", request.hosts]
    return options if options or request.instances > 1 else None  # it joins several hosts


def variables_of_hosts(request: JobRequest) -> dict[str, str]:
    """Returns the variables by which `nanotf run` on simulated hosts finds the others."""
    if request.instances == 1:
        return {}
    pairs = (f"{host}={address}" for host, address in request.host_addresses.items())
    return {
        "NANOTF_HOST_ADDRESSES": ",".join(pairs),
        "NANOTF_PORT": str(free_port()),
        "NANOTF_SECRET": secrets.token_hex(32),
        OWN_CODE_VARIABLE: "1",  # who has failed by itself, and who has followed?
    }


def python_path(code: pathlib.Path, aliases: pathlib.Path) -> str:
    """Returns PYTHONPATH of a script: its code, yours, nanotf if it is not installed, aliases."""
    paths = [str(code), os.environ.get("PYTHONPATH", "")]
    here = str(pathlib.Path(nanotf.__file__).resolve().parents[1])
    # In PYTHONPATH, site-packages would hide what the job's requirements.txt has installed.
    if here not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths.append(here)
    return os.pathsep.join([*filter(None, paths), str(aliases)])  # last: a real package wins
