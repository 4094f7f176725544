"""Reads and steers a running job, from any process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.detached import following
from nanotf.sagemaker.jobs import addresses, archives, metrics
from nanotf.sagemaker.jobs.record import JobFolder, JobState
from nanotf.wire.log_files import LogTail


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
        self._held = ""  # what was read, and not returned yet
        hosts = hosts if host is None else [host]
        self._tails = [
            LogTail(job.log(each, rank), "" if len(hosts) == 1 else f"{each}: ") for each in hosts
        ]

    def read(self) -> str:
        """Returns the whole lines that were written since the last call."""
        for tail in self._tails:
            self._held += tail.read()  # what was read is kept if the next one fails
        text, self._held = self._held, ""
        return text


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
    return following.wait(job, log, LogReader(job, host, rank).read)


def stop(job: JobFolder) -> JobState:
    """Asks a job to stop: SIGTERM to its script, SIGKILL after `JobRequest.stop_seconds`.

    Returns and raises as `following.stop`, `JobError` among others.
    """
    return following.stop(job)


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
        "Waiting": state.waiting,
        "NumProcesses": request.num_processes,
        "Hosts": request.hosts,
        "Folder": str(job.path),
    }
    # As boto3, whose answers leave out what is not there.
    return {key: value for key, value in description.items() if value is not None}


def _channel(channel: Any) -> dict[str, Any]:
    return {"ChannelName": channel.name, "Source": channel.source, **channel.configuration()}


def model_data(job: JobFolder) -> str | None:
    """Returns the address of the model's archive; None if the job has made none."""
    if not job.model.exists():
        return None
    upload = job.read_request().upload
    # Until it has arrived, and after a failed upload, it is only here.
    if upload is not None and job.model.name in job.read_state().uploaded:
        return addresses.join(upload, job.name, "output", job.model.name)
    return str(job.model)


def model_outside(job: JobFolder) -> str | None:
    """Returns the `model_dir` of a job that has no archive of a model; None if it is empty, too."""
    found = archives.model_dir(job, job.read_request())
    if job.model.exists() or found is None:
        return None
    if isinstance(found, str):  # storage that the script itself writes to
        return found
    return str(found) if found.is_dir() and any(found.iterdir()) else None


def told_of_model(job: JobFolder) -> str:
    """Returns the end of a line about a completed job: where its model is."""
    if (archive := model_data(job)) is not None:
        return f"; model: {archive}"
    outside = model_outside(job)
    if outside is None:
        return ""
    return (
        f"; SM_MODEL_DIR is empty, so there is no model.tar.gz; the script's model_dir: {outside}"
    )
