"""Starts a job: checks the request, makes its folder, and hands it to a supervisor."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from nanotf.errors import InvalidArgumentError
from nanotf.machine import topology
from nanotf.sagemaker import script_aliases
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.jobs import (
    addresses,
    container_base,
    hyperparameters,
    record,
    script_variables,
)
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState
from nanotf.wire import files

_MAX_HOSTS = 200  # of one machine: each has an address 127.0.0.k


def check(request: JobRequest) -> None:
    """Rejects a request that cannot be met here, before any process starts.

    Raises:
        InvalidArgumentError: The request, or something that it names, cannot be used.
    """
    record.KIND.check_name(request.name)
    request.source.check()
    for channel in request.channels:
        channel.check()
    for metric in request.metrics:
        metric.check()
    hyperparameters.encode(request.hyperparameters)
    if request.num_processes not in (None, topology.AUTO):
        number = topology.check_num_processes(_number(request.num_processes))
        if request.hosts is None:
            topology.plan(number)  # simulated hosts share cores, but workers of one host do not
    _check_hosts(request)
    for name, seconds in (("max_run", request.max_run), ("stop_seconds", request.stop_seconds)):
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise InvalidArgumentError(
                f"`{name}` must be a number of seconds above 0. Received: {name}={seconds}."
            )
    for address in (request.checkpoints, request.upload):
        # A local folder of checkpoints need not exist: the supervisor makes it.
        if address is not None and addresses.local_path(address) is None:
            addresses.check(address)


def _number(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise InvalidArgumentError(
            f"-n must be a whole number, or {topology.AUTO!r}. Received: -n {text}."
        ) from None


def _check_hosts(request: JobRequest) -> None:
    if not 1 <= request.instances <= _MAX_HOSTS:
        raise InvalidArgumentError(
            f"A job must have 1 to {_MAX_HOSTS} instances. Received: {request.instances}."
        )
    if request.hosts is not None and request.instances > 1:
        raise InvalidArgumentError(
            "A job runs either on real hosts or on simulated ones. Received: "
            f"hosts={request.hosts}, instances={request.instances}. Leave one out."
        )
    if request.ranks and request.num_processes in (None, topology.AUTO):
        raise InvalidArgumentError(
            f"Ranks need their number. Received: -n {request.num_processes}. Pass -n N."
        )
    # `nanotf run` joins the hosts, and it runs Python.
    several = request.instances > 1 or request.hosts is not None
    if several and not request.source.entry.endswith(".py"):
        raise InvalidArgumentError(
            "Several hosts run Python scripts only. Received: "
            f"{request.source.script}. Let a Python script be the entry point."
        )


def start(request: JobRequest, output: str | os.PathLike[str] | None = None) -> JobFolder:
    """Starts a job.

    Args:
        output: the folder of jobs; None as in `Kind.folder`.

    Returns:
        The job's folder. A supervisor owns it, and outlives this process.

    Raises:
        InvalidArgumentError: as `check`; or a job of this name exists.
        JobError: The disk is full, or the supervisor did not start.
    """
    check(request)
    request = _absolute(request)
    job = JobFolder(record.KIND.folder(output) / request.name)
    starting.create(job, lambda: _fill(job, request))
    hyperparameters.warn_of_booleans(request.hyperparameters)
    starting.start_supervisor(job, "nanotf.sagemaker.jobs.supervisor")
    return job


def _absolute(request: JobRequest) -> JobRequest:
    """Returns a request whose data any process finds, in any working directory."""
    channels = [replace(each, source=_path(each.source)) for each in request.channels]
    checkpoints = None if request.checkpoints is None else _path(request.checkpoints)
    return replace(request, channels=tuple(channels), checkpoints=checkpoints)


def _path(address: str) -> str:
    path = addresses.local_path(address)
    return address if path is None else str(path)


def _fill(job: JobFolder, request: JobRequest) -> None:
    """Writes the code, the trees and the records of a job."""
    request.source.copy(job.code)
    container_base.prepare(job, request)
    script_aliases.write(job.aliases)
    values = request.hyperparameters | {
        "sagemaker_program": request.source.entry,
        "sagemaker_submit_directory": str(job.code),
        "sagemaker_container_log_level": script_variables.LOG_LEVEL,
        "sagemaker_job_name": request.name,
    }
    job.shared_model.mkdir(parents=True)
    for host in request.host_names:
        tree = job.tree(host)
        tree.make()
        tree.shared.symlink_to(job.shared_model.parent, target_is_directory=True)
        tree.code.symlink_to(job.code, target_is_directory=True)
        encoded = hyperparameters.encode(values)
        files.write_json(tree.hyperparameters, encoded, mode=files.PRIVATE)  # may hold secrets
        resources = script_variables.resource_config(request.host_names, host)
        files.write_json(tree.resources, resources)
        channels = {channel.name: channel.configuration() for channel in request.channels}
        files.write_json(tree.input_data, channels)
    job.write_request(request)
    # Last: a folder counts as a job (`record.find`) once it has a state.
    job.write_state(JobState(record.IN_PROGRESS, "Starting", Owner.this_process(), created=now()))
