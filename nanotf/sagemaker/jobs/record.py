"""A job's folder: what was asked for, its state, and who owns it.

    <output>/<name>/
        request.json    what was asked for; written once, before the supervisor starts
        state.json      the state; replaced in one step, by the job's owner alone
        metrics.jsonl   one line for each metric found in the log
        logs/           <host>.log, what the script prints; <host>/rank-<n>.log, what its workers
                        print; supervisor.log
        code/           the copied code
        hosts/<host>/   the tree of each host, as under /opt/ml
        shared/model/   the hyperparameter `model_dir` of a local estimator
        model.tar.gz, output.tar.gz

The owner is first the process that launches the job, then its supervisor. Nobody else writes the
state, so an owner that was killed leaves "InProgress" behind. Readers therefore look whether the
owner still lives: by its pid and its start time, since pids are used again.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from nanotf.errors import InvalidArgumentError, JobError
from nanotf.machine import process_identity
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.sagemaker.jobs.tree import Tree
from nanotf.wire import files

IN_PROGRESS, STOPPING = "InProgress", "Stopping"
COMPLETED, FAILED, STOPPED = "Completed", "Failed", "Stopped"
FINAL = (COMPLETED, FAILED, STOPPED)
REASON_LENGTH = 1024  # of the text in output/failure, as a container's platform reports it

FOLDER_VARIABLE = "NANOTF_JOBS"
DEFAULT_FOLDER = "jobs"
MAX_NAME = 63
# SageMaker's rule of job names.
_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}")


def _must(is_right: bool, what: str) -> None:
    """Raises `Damaged` for a part of a record that nanotf cannot have written."""
    if not is_right:
        raise files.Damaged(f"a job's record has a wrong value: {what}")


@dataclass(frozen=True)
class JobRequest:
    """The description of a job to run. `launch.start` checks it."""

    name: str
    source: SourceCode
    hyperparameters: dict[str, Any] = field(default_factory=dict)  # values that JSON can hold
    channels: tuple[DataChannel, ...] = ()
    # `-n` of `nanotf run`: a number, or "auto". None runs the script in plain Python on one host.
    num_processes: str | None = None
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
        _must(all(isinstance(text, str) for text in texts), "names")
        _must(all(isinstance(t, str | None) for t in (*may_lack, found.source.folder)), "texts")
        _must(type(found.instances) is int and 0 < found.instances < 1 << 16, "instances")
        _must(isinstance(found.max_run, int | float | None), "max_run")
        _must(isinstance(found.stop_seconds, int | float), "stop_seconds")
        _must(isinstance(found.hyperparameters, dict), "hyperparameters")
        _must(all(isinstance(v, str) for v in found.environment.values()), "environment")
        return found


@dataclass(frozen=True)
class Owner:
    """The process that owns a job."""

    pid: int
    start: str  # tells the process from later ones with the same pid
    node: str  # the machine's name
    is_supervisor: bool = False  # False for a process that launches the job

    @classmethod
    def this_process(cls, *, is_supervisor: bool = False) -> Owner:
        """Returns this process."""
        start = process_identity.start_of(os.getpid())
        assert start is not None
        return cls(os.getpid(), start, platform.node(), is_supervisor)

    @property
    def is_here(self) -> bool:
        """True if the process runs, or ran, on this machine."""
        return self.node == platform.node()

    def is_alive(self) -> bool:
        """Returns False if the process has ended. True on another machine, where none can tell."""
        return not self.is_here or process_identity.start_of(self.pid) == self.start


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
        owner = Owner(**value["owner"])
        state = cls(**value | {"owner": owner})
        beside = state.failure_reason, state.failure_beside_log
        texts = (state.status, state.phase, state.created, owner.start, owner.node)
        _must(state.status in (IN_PROGRESS, STOPPING, *FINAL), "status")
        _must(type(owner.pid) is int and 0 < owner.pid < 1 << 31, "owner")
        _must(all(isinstance(text, str) for text in texts), "texts")
        _must(
            all(isinstance(t, str | None) for t in (state.started, state.ended, *beside)), "texts"
        )
        _must(all(isinstance(code, int) for code in state.exit_codes.values()), "exit_codes")
        return state


@dataclass(frozen=True)
class JobFolder:
    """A job on disk."""

    path: pathlib.Path  # the job's folder, whose name is the job's

    @property
    def name(self) -> str:
        """The job's name."""
        return self.path.name

    @property
    def code(self) -> pathlib.Path:
        """The copied code."""
        return self.path / "code"

    @property
    def shared_model(self) -> pathlib.Path:
        """The folder of `Tree.shared_model`, one for all hosts."""
        return self.path / "shared" / "model"

    @property
    def metrics(self) -> pathlib.Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> pathlib.Path:
        """The folder of logs."""
        return self.path / "logs"

    @property
    def supervisor_log(self) -> pathlib.Path:
        """The log of the supervisor itself."""
        return self.logs / "supervisor.log"

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

    def write_request(self, request: JobRequest) -> None:
        """Writes the request. Raises `OSError` if the disk is full."""
        path = self.path / "request.json"
        files.write_json(path, asdict(request), indent=2, mode=files.PRIVATE)

    def read_request(self) -> JobRequest:
        """Reads the request. Raises `JobError` if it is damaged."""
        path = self.path / "request.json"
        with _readable(path):
            return JobRequest.from_json(files.read_json(path))

    def write_state(self, state: JobState) -> None:
        """Replaces the state in one step. Only the owner calls this. Raises `OSError`."""
        files.write_json(self._state, asdict(state), indent=2, mode=files.PRIVATE)

    @property
    def _state(self) -> pathlib.Path:
        return self.path / "state.json"

    def read_state(self) -> JobState:
        """Reads the state. An unfinished job whose owner has ended is a failed one.

        Raises:
            JobError: The file is damaged.
        """
        with _readable(self._state):
            value = files.read_json(self._state)
            state = JobState.from_json(value)
        if state.is_final or state.owner.is_alive():
            return state
        with _readable(self._state):
            again = files.read_json(self._state)  # its last act may have been to write
        if again != value:
            return self.read_state()
        return replace(
            state,
            status=FAILED,
            phase=FAILED,
            failure_reason=f"The supervisor of the job (process {state.owner.pid}) ended without "
            "recording an end: it was killed, the machine restarted, or the disk was full. "
            f"See {self.supervisor_log}.",
        )


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Names a job's file that nobody can read in a `JobError`."""
    try:
        with files.doubting(path):
            yield
    except (OSError, files.Damaged) as error:
        raise JobError(
            f"The record of a job must be as nanotf has written it. Received: {error}. The job's "
            "folder has its logs and what it has saved; delete it when you do not need them."
        ) from error


def now() -> str:
    """Returns the time, in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def folder_of_jobs(output: str | os.PathLike[str] | None) -> pathlib.Path:
    """Returns the folder that holds the jobs: `output`, else `NANOTF_JOBS`, else `jobs`."""
    return pathlib.Path(output or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).absolute()


def make_name(base: str) -> str:
    """Returns a job's name: the base, then the time in UTC to the millisecond.

    Args:
        base: other characters than letters and digits become "-".
    """
    moment = datetime.now(timezone.utc)
    stamp = f"{moment:%Y-%m-%d-%H-%M-%S}-{moment.microsecond // 1000:03d}"
    words = re.sub(r"[^A-Za-z0-9]+", "-", base).strip("-")[: MAX_NAME - len(stamp) - 1].strip("-")
    return f"{words or 'job'}-{stamp}"


def check_name(name: str) -> None:
    """Rejects a name that a job cannot have. Raises `InvalidArgumentError`."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"A job's name must have 1 to {MAX_NAME} letters, digits and dashes, with a letter or "
            f"a digit at both ends. Received: {name!r}."
        )


def find(name: str, output: str | os.PathLike[str] | None = None) -> JobFolder:
    """Returns a job.

    Args:
        output: the folder of jobs; None as in `folder_of_jobs`.

    Raises:
        InvalidArgumentError: There is no such job.
    """
    check_name(name)
    folder = folder_of_jobs(output)
    job = JobFolder(folder / name)
    if not (job.path / "state.json").is_file():
        raise InvalidArgumentError(
            f"The job must exist. Received: {name}, which is not in {folder}. `nanotf jobs list` "
            f"shows the jobs there; --output or {FOLDER_VARIABLE} names another folder."
        )
    return job


def find_all(output: str | os.PathLike[str] | None = None) -> Iterator[JobFolder]:
    """Yields the jobs of a folder, by name."""
    for path in sorted(folder_of_jobs(output).glob("*/state.json")):
        if _NAME.fullmatch(path.parent.name):
            yield JobFolder(path.parent)
