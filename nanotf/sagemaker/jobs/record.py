"""A job's folder: what was asked for, its state, and who owns it.

<output>/<name>/
    request.json    what was asked for; written once, before the supervisor starts
    state.json      the state; replaced in one step, by the job's owner alone
    metrics.jsonl   one line for each metric found in the log
    logs/           <host>.log, what the script prints; <host>/rank-<n>.log, what its workers
                    print; supervisor.log
    code/           the copied code
    etc-hosts       /etc/hosts of the scripts
    aliases/        packages that stand for SageMaker's, for the script's PYTHONPATH
    hosts/<host>/   the tree of each host, as under /opt/ml
    shared/model/   the hyperparameter `model_dir` of a local estimator
    model.tar.gz, output.tar.gz
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nanotf.errors import JobError
from nanotf.sagemaker.detached import folders
from nanotf.sagemaker.detached.folders import DetachedFolder, Kind
from nanotf.sagemaker.detached.owner import Owner, must
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.sagemaker.jobs.tree import Tree

IN_PROGRESS, STOPPING = "InProgress", "Stopping"
COMPLETED, FAILED, STOPPED = "Completed", "Failed", "Stopped"
FINAL = (COMPLETED, FAILED, STOPPED)
UPLOADING = "Uploading"  # the phase in which a stop ends the upload
REASON_LENGTH = 1024  # of the text in output/failure, as a container's platform reports it

KIND = Kind("job", "a job", "NANOTF_JOBS", "jobs", JobError, running=(IN_PROGRESS,))


@dataclass(frozen=True)
class JobRequest:
    """The description of a job to run. `launch.start` checks it."""

    name: str
    source: SourceCode
    hyperparameters: dict[str, Any] = field(default_factory=dict)  # values that JSON can hold
    channels: tuple[DataChannel, ...] = ()
    # `-n` of `nanotf run`: a number, or "auto". None runs the script in plain Python on one host.
    num_processes: str | None = None
    ranks: bool = False  # `--ranks` of `nanotf run`: `num_processes` counts ranks
    hosts: str | None = None  # `--hosts` of `nanotf run`: real machines; None for this one
    instances: int = 1  # more simulate as many hosts on this machine
    metrics: tuple[Metric, ...] = ()  # searched in each line of the log
    max_run: float | None = None  # seconds after which the script is stopped; None: no limit
    stop_seconds: float = 120.0  # from SIGTERM to SIGKILL
    environment: dict[str, str] = field(default_factory=dict)  # variables of the script alone
    # A path or an address that holds the checkpoints; None for a folder of the job's own.
    checkpoints: str | None = None
    upload: str | None = None  # an address that receives the archives at the end; None for none

    @property
    def host_names(self) -> list[str]:
        """The names of the job's hosts: "algo-1", "algo-2", ... sorted as a container has them."""
        return sorted(f"algo-{number}" for number in range(1, self.instances + 1))

    @property
    def host_addresses(self) -> dict[str, str]:
        """The address of each simulated host: all use the same ports."""
        numbers = {host: int(host.rpartition("-")[2]) for host in self.host_names}
        return {host: f"127.0.0.{number}" for host, number in numbers.items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> JobRequest:
        """Reads what `asdict` has written."""
        # JSON has lists alone; the fields are tuples.
        source = value["source"] | {"dependencies": tuple(value["source"]["dependencies"])}
        found = cls(
            **value
            | {
                "source": SourceCode(**source),
                "channels": tuple(DataChannel(**each) for each in value["channels"]),
                "metrics": tuple(Metric(**each) for each in value["metrics"]),
            }
        )
        texts = (found.name, found.source.script, *found.source.dependencies)
        texts += tuple(text for each in found.channels for text in (each.name, each.source))
        may_lack = (found.num_processes, found.hosts, found.checkpoints, found.upload)
        must(all(isinstance(text, str) for text in texts), "names")
        must(isinstance(found.ranks, bool), "ranks")
        must(all(isinstance(t, str | None) for t in (*may_lack, found.source.folder)), "texts")
        must(type(found.instances) is int and 0 < found.instances < 1 << 16, "instances")
        must(isinstance(found.max_run, int | float | None), "max_run")
        must(isinstance(found.stop_seconds, int | float), "stop_seconds")
        must(isinstance(found.hyperparameters, dict), "hyperparameters")
        must(all(isinstance(v, str) for v in found.environment.values()), "environment")
        return found


@dataclass(frozen=True)
class JobState:
    """The state of a job. Times are UTC as ISO 8601."""

    status: str  # "InProgress", "Stopping", or final: "Completed", "Failed", "Stopped"
    # The part of the work: "Starting", "Downloading", "Training", "Uploading",
    # "MaxRuntimeExceeded", or the status.
    phase: str
    owner: Owner
    created: str  # the job's folder was made
    started: str | None = None  # the script was started
    ended: str | None = None  # the state became final
    exit_codes: dict[str, int] = field(default_factory=dict)  # by host; 128 + n after signal n
    failure_reason: str | None = None  # at most 1,024 characters
    # The reason without what the script's log ends with; None if the log says nothing of it.
    failure_beside_log: str | None = None
    uploaded: list[str] = field(default_factory=list)  # names of archives that have arrived
    waiting: str | None = None  # what waits for room on the disk

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self.status in FINAL

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> JobState:
        """Reads what `asdict` has written.

        Raises:
            Exception: Something else has written it.
        """
        owner = Owner.from_json(value["owner"])
        state = cls(**value | {"owner": owner})
        beside = state.failure_reason, state.failure_beside_log, state.waiting
        texts = (state.status, state.phase, state.created)
        must(state.status in (IN_PROGRESS, STOPPING, *FINAL), "status")
        must(all(isinstance(text, str) for text in texts), "texts")
        must(all(isinstance(t, str | None) for t in (state.started, state.ended, *beside)), "texts")
        must(all(isinstance(name, str) for name in state.uploaded), "uploaded")
        must(all(isinstance(code, int) for code in state.exit_codes.values()), "exit_codes")
        return state


@dataclass(frozen=True)
class JobFolder(DetachedFolder[JobRequest, JobState]):
    """A job on disk."""

    kind = KIND

    @staticmethod
    def request_of(value: dict[str, Any]) -> JobRequest:
        """Reads a request."""
        return JobRequest.from_json(value)

    @staticmethod
    def state_of(value: dict[str, Any]) -> JobState:
        """Reads a state."""
        return JobState.from_json(value)

    @staticmethod
    def failed(state: JobState, reason: str, ended: str | None = None) -> JobState:
        """Returns the state after a failure."""
        return replace(state, status=FAILED, phase=FAILED, failure_reason=reason, ended=ended)

    @classmethod
    def may_stop(cls, state: JobState) -> bool:
        """Returns True also for an upload after a stop: another stop ends that."""
        return super().may_stop(state) or (state.status == STOPPING and state.phase == UPLOADING)

    @staticmethod
    def notice_of(state: JobState) -> str | None:
        """Returns what keeps the job waiting."""
        return state.waiting

    @property
    def code(self) -> pathlib.Path:
        """The copied code."""
        return self.path / "code"

    @property
    def aliases(self) -> pathlib.Path:
        """Packages that stand for SageMaker's, see `script_aliases`."""
        return self.path / "aliases"

    @property
    def names_of_hosts(self) -> pathlib.Path:
        """`/etc/hosts` of the scripts."""
        return self.path / "etc-hosts"

    @property
    def shared_model(self) -> pathlib.Path:
        """The folder of `Tree.shared_model`, one for all hosts."""
        return self.path / "shared" / "model"

    @property
    def metrics(self) -> pathlib.Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> pathlib.Path:
        """The archive of the model."""
        return self.path / "model.tar.gz"

    @property
    def output(self) -> pathlib.Path:
        """The archive of other output."""
        return self.path / "output.tar.gz"

    def log(self, host: str, rank: int | None = None) -> pathlib.Path:
        """Returns the log of a host's script, or that of one of its workers."""
        if rank is None:
            return self.logs / f"{host}.log"
        return self.worker_logs(host) / f"rank-{rank}.log"

    def worker_logs(self, host: str) -> pathlib.Path:
        """Returns the folder of the logs of a host's workers."""
        return self.logs / host

    def tree(self, host: str) -> Tree:
        """Returns the tree of a host."""
        return Tree(self.path / "hosts" / host)


def find(name: str, output: str | os.PathLike[str] | None = None) -> JobFolder:
    """Returns a job, as `folders.find` does."""
    return folders.find(JobFolder, name, output)


def find_all(output: str | os.PathLike[str] | None = None) -> Iterator[JobFolder]:
    """Yields the jobs of a folder, by name."""
    return folders.find_all(JobFolder, output)
