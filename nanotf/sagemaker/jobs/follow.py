"""Reads and steers a running job, from any process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, TextIO

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, JobError
from nanotf.pool import stalls
from nanotf.sagemaker.jobs import addresses, metrics, record
from nanotf.sagemaker.jobs.record import JobFolder, JobState

_PAUSE = 0.2  # seconds between two looks at a log
_STOP_SECONDS = 30.0  # until a supervisor reacts to a signal, on a busy machine


class LogReader:
    """Reads the logs of a job's hosts from where it has stopped.

    Args:
        host: one host; None reads all, and names the host in each line if there are several.
        rank: a worker of the host (of the first one if `host` is None); None reads what the script
            itself prints.

    Raises:
        InvalidArgumentError: The job has no such host, or the host no log of this rank.
    """

    def __init__(self, job: JobFolder, host: str | None = None, rank: int | None = None) -> None:
        hosts = job.read_request().host_names
        if host is not None and host not in hosts:
            raise InvalidArgumentError(
                f"The host must be one of {', '.join(hosts)}. Received: host={host}."
            )
        if rank is not None:
            host = host or hosts[0]
            if not job.log(host, rank).is_file():
                logs = job.worker_logs(host).glob("rank-*.log")
                known = sorted(int(path.stem.removeprefix("rank-")) for path in logs)
                ranks = f"the ranks {', '.join(map(str, known))}" if known else "no workers"
                raise InvalidArgumentError(
                    f"The rank must be that of a worker of {host}. Received: rank={rank}; this "
                    f"host has {ranks}."
                )
        self._rank = rank
        self._hosts = hosts if host is None else [host]
        self._job = job
        self._positions = dict.fromkeys(self._hosts, 0)

    def read(self) -> str:
        """Returns the whole lines that were written since the last call."""
        return "".join(self._read(host) for host in self._hosts)

    def _read(self, host: str) -> str:
        path = self._job.log(host, self._rank)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._positions[host])
            data = file.read()
        # The supervisor may be in the middle of a line; the rest of it comes with the next call.
        data = data[: data.rfind(b"\n") + 1]
        self._positions[host] += len(data)
        text = data.decode(errors="replace")
        if len(self._hosts) == 1:
            return text
        return "".join(f"{host}: {line}" for line in text.splitlines(keepends=True))


def wait(
    job: JobFolder,
    log: Callable[[str], object] | None = None,
    host: str | None = None,
    rank: int | None = None,
) -> JobState:
    """Waits until a job has ended.

    Args:
        log: receives the log as it grows, from its beginning; None prints nothing.
        host, rank: as in `LogReader`.

    Returns:
        The final state.
    """
    reader, told = LogReader(job, host, rank), False
    while True:
        state = job.read_state()  # before the log: a final state means that the log is whole
        if log is not None and (text := reader.read()):
            log(text)
        if state.is_final:
            return state
        if not told and state.owner.is_here and stalls.is_stopped(state.owner.pid):
            told = True
            logger.warning("%s", _of_stopped(job, state))
        time.sleep(_PAUSE)


def _of_stopped(job: JobFolder, state: JobState) -> str:
    return (
        f"A signal (SIGSTOP) has stopped process {state.owner.pid}, the supervisor of {job.name}: "
        f"nothing of the job is recorded until it continues (`kill -CONT {state.owner.pid}`)."
    )


def print_to(file: TextIO) -> Callable[[str], object]:
    """Returns a function that prints text at once."""

    def write(text: str) -> None:
        file.write(text)
        file.flush()

    return write


def stop(job: JobFolder) -> JobState:
    """Asks a job to stop: SIGTERM to its script, SIGKILL after `JobRequest.stop_seconds`.

    Returns:
        The state after the supervisor has begun to stop it.

    Raises:
        InvalidArgumentError: The job has ended, or is being stopped already.
        JobError: The supervisor is on another machine, or does not react.
    """
    state = _supervised(job)
    if state.status != record.IN_PROGRESS:
        raise InvalidArgumentError(
            f"Only a job in progress can be stopped. Received: {job.name}, whose status is "
            f"{state.status}."
        )
    if not state.owner.is_here:
        raise JobError(
            f"A job is stopped on the machine that runs it. Received: {job.name}, which runs on "
            f"{state.owner.node}. Call `nanotf jobs stop {job.name}` there."
        )
    # The job may end at this moment; its last state is then the answer.
    try:
        os.kill(state.owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        return job.read_state()
    deadline = time.monotonic() + _STOP_SECONDS
    while (state := job.read_state()).status == record.IN_PROGRESS:
        if time.monotonic() > deadline:
            if stalls.is_stopped(state.owner.pid):
                raise JobError(_of_stopped(job, state))
            raise JobError(
                f"The supervisor of a job must react to SIGTERM in {_STOP_SECONDS:.0f} s. "
                f"Received: no reaction of process {state.owner.pid}, job {job.name}. Kill it: the "
                "kernel then ends the script."
            )
        time.sleep(_PAUSE)
    return state


def _supervised(job: JobFolder) -> JobState:
    """Returns the state once the job has a supervisor; the launching process must not be stopped.

    Raises:
        JobError: The launching process does not hand the job over.
    """
    deadline = time.monotonic() + _STOP_SECONDS
    while not (state := job.read_state()).is_final and not state.owner.is_supervisor:
        if time.monotonic() > deadline:
            raise JobError(
                f"A job is stopped after it has begun. Received: {job.name}, which process "
                f"{state.owner.pid} still prepares. Try again, or end that process."
            )
        time.sleep(_PAUSE)
    return state


def describe(job: JobFolder) -> dict[str, Any]:
    """Returns a job with the keys of SageMaker's DescribeTrainingJob, and some of its own."""
    request, state = job.read_request(), job.read_state()
    found = metrics.last_values(metrics.read(job.metrics))
    description = {
        "TrainingJobName": job.name,
        "TrainingJobArn": f"local:training-job/{job.name}",
        "TrainingJobStatus": state.status,
        "SecondaryStatus": state.phase,
        "FailureReason": state.failure_reason,
        "CreationTime": state.created,
        "TrainingStartTime": state.started,
        "TrainingEndTime": state.ended,
        "HyperParameters": request.hyperparameters,
        "Environment": request.environment,
        "InputDataConfig": [_channel(channel) for channel in request.channels],
        "ResourceConfig": {"InstanceCount": request.instances, "InstanceType": "local"},
        "StoppingCondition": {"MaxRuntimeInSeconds": request.max_run},
        "OutputDataConfig": {"S3OutputPath": request.upload or job.path.parent.as_uri()},
        "ModelArtifacts": {"S3ModelArtifacts": model_data(job)},
        "FinalMetricDataList": [{"MetricName": n, "Value": v} for n, v in found.items()],
        "ExitCodes": state.exit_codes,
        "NumProcesses": request.num_processes,
        "Hosts": request.hosts,
        "Folder": str(job.path),
    }
    return {key: value for key, value in description.items() if value is not None}


def _channel(channel: Any) -> dict[str, Any]:
    return {"ChannelName": channel.name, "Source": channel.source, **channel.configuration()}


def model_data(job: JobFolder) -> str | None:
    """Returns the address of the model's archive; None if the job has made none."""
    if not job.model.exists():
        return None
    upload = job.read_request().upload
    # The supervisor uploads before it writes the final state; the upload may not exist before.
    if upload is not None and job.read_state().is_final:
        return addresses.join(upload, job.name, "output", job.model.name)
    return str(job.model)
