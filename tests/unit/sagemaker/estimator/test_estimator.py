"""The estimator's arguments: names old and new, `distribution`, inputs; no job runs."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest

from nanotf import console
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NanoError,
    UnavailableError,
)
from nanotf.estimator import ShuffleConfig, TensorFlow, TrainingInput
from nanotf.machine import tensorflow_build, topology
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.estimator import estimator_arguments
from nanotf.sagemaker.estimator.training_inputs import as_channels
from nanotf.sagemaker.jobs import launch, record
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState

ACCURACY = {"Name": "val:acc", "Regex": "val_accuracy: ([0-9.]+)"}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[JobRequest]:
    """The requests of jobs that would have been started."""
    found: list[JobRequest] = []

    def start(request: JobRequest, output: Any) -> JobFolder:
        launch.check(request)
        found.append(request)
        return JobFolder(pathlib.Path(output) / request.name)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(console.lines, "_warned", set())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return found


def _fit(requests: list[JobRequest], **given: Any) -> JobRequest:
    TensorFlow(entry_point="train.py", **given).fit(wait=False, job_name="a")
    return requests[-1]


def test_arguments_become_a_request(requests: list[JobRequest], tmp_path: pathlib.Path) -> None:
    request = _fit(
        requests,
        hyperparameters={"epochs": 3},
        model_dir=False,
        instance_count=2,
        instance_type="local",
        max_run=60,
        metric_definitions=[ACCURACY],
        environment={"A": "b"},
        checkpoint_s3_uri=str(tmp_path),
    )
    assert request.hyperparameters == {"epochs": 3}
    assert (request.instances, request.max_run, request.num_processes) == (2, 60, None)
    assert request.metrics == (Metric("val:acc", "val_accuracy: ([0-9.]+)"),)
    assert request.environment == {"A": "b"}
    assert request.checkpoints == str(tmp_path)


def test_old_names_and_one_line(
    requests: list[JobRequest], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nanotf"):
        request = _fit(
            requests, train_instance_count=2, train_instance_type="local", train_max_run=9
        )
    assert (request.instances, request.max_run) == (2, 9)
    (line,) = caplog.records
    assert "train_instance_count is now instance_count, train_instance_type is now" in str(
        line.getMessage()
    )


def test_names_that_matter_in_the_cloud_alone(
    requests: list[JobRequest], caplog: pytest.LogCaptureFixture
) -> None:
    names = dict.fromkeys(estimator_arguments.WITHOUT_EFFECT, "x")
    with caplog.at_level(logging.WARNING, "nanotf"):
        for _ in range(2):
            assert _fit(requests, model_dir=False, **names).hyperparameters == {}
        _fit(requests, model_dir=False, role=None, disable_profiler=False)
    (line,) = caplog.records
    told = line.getMessage()
    assert told.startswith("Without effect on this machine: the arguments code_location, ")
    assert all(name in told for name in names)


def test_the_version_of_tensorflow(
    requests: list[JobRequest],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = ("tensorflow-cpu 2.21.0",)
    monkeypatch.setattr(tensorflow_build, "installed_packages", lambda: packages)
    with caplog.at_level(logging.WARNING, "nanotf"):
        _fit(requests, framework_version="2.21")
        assert not caplog.records
        _fit(requests, framework_version="2.3.1")
    (line,) = caplog.records
    assert "framework_version='2.3.1'; installed: tensorflow-cpu 2.21.0." in line.getMessage()


def test_a_model_as_a_channel(requests: list[JobRequest], tmp_path: pathlib.Path) -> None:
    request = _fit(requests, model_uri=tmp_path)
    assert request.channels == (DataChannel("model", str(tmp_path)),)
    request = _fit(requests, model_uri=str(tmp_path), model_channel_name="before")
    assert request.channels == (DataChannel("before", str(tmp_path)),)
    estimator = TensorFlow(entry_point="train.py", model_uri=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"a name of its own. Received: 'model'"):
        estimator.fit({"model": str(tmp_path)}, wait=False)


def test_tensorboard(requests: list[JobRequest], capsys: pytest.CaptureFixture[str]) -> None:
    TensorFlow(entry_point="train.py", output_path="my jobs").fit(
        wait=False, job_name="a", run_tensorboard_locally=True
    )
    assert "tensorboard --logdir '" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"instance_type": "ml.c5.xlarge"}, UnavailableError, "must be 'local'.*ml.c5.xlarge"),
        ({"instance_type": "local_gpu"}, UnavailableError, "must be 'local'"),
        ({"git_config": {"repo": "x"}}, UnavailableError, "does not support `git_config`"),
        ({"epoch": 3}, InvalidArgumentTypeError, r"Received: \['epoch'\]"),
        ({"hyperparameter": {}}, InvalidArgumentTypeError, "Did you mean `hyperparameters`"),
        ({"max_run": 1, "train_max_run": 2}, InvalidArgumentTypeError, "under one name"),
        ({"metric_definitions": [{"Name": "a"}]}, InvalidArgumentError, "with Name and Regex"),
        ({"distribution": {"horovod": {}}}, InvalidArgumentError, r"Received: \['horovod'\]"),
        ({"distribution": "mpi"}, InvalidArgumentTypeError, "Received: distribution='mpi'"),
        ({"distribution": {"mpi": True}}, InvalidArgumentTypeError, "Received: mpi=True"),
        (
            {"distribution": {"smdistributed": True}},
            InvalidArgumentTypeError,
            "a dict with keys among modelparallel, dataparallel",
        ),
        (
            {"distribution": {"smdistributed": {"dataparallel": "yes"}}},
            InvalidArgumentTypeError,
            "Received: dataparallel='yes'. Pass a dict with keys among enabled",
        ),
        (
            {"distribution": {"mpi": {1: True}}},
            InvalidArgumentError,
            r"'mpi' of `distribution` must have keys among .* Received: \['1'\]",
        ),
        (
            {"distribution": {"mpi": {"enabled": True, "process_per_host": 2}}},
            InvalidArgumentError,
            "'mpi' of `distribution`.*Did you mean 'processes_per_host'",
        ),
        (
            {"distribution": {"smdistributed": {"modelparallel": {"enable": True}}}},
            InvalidArgumentError,
            "'modelparallel' of `distribution` must have keys among enabled, parameters",
        ),
        ({"instance_count": 0}, InvalidArgumentError, "at least 1. Received: instance_count=0"),
        ({"instance_count": "2"}, InvalidArgumentError, "Received: instance_count='2'"),
        ({"script_mode": False}, UnavailableError, "Script Mode. Received: script_mode=False"),
        ({"training_steps": 9}, UnavailableError, "Pass it in hyperparameters"),
        ({"requirements_file": "r.txt"}, UnavailableError, "Name it requirements.txt"),
        ({"hyperparameters": {"a": object()}}, InvalidArgumentTypeError, "Received: a=<object"),
    ],
)
def test_arguments_that_cannot_be_used(given: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(NanoError, match=text) as caught:
        TensorFlow(entry_point="train.py", **given)
    assert caught.type is kind


def test_results_before_a_job() -> None:
    with pytest.raises(InvalidArgumentError, match=r"after fit\(\) or attach\(\)"):
        _ = TensorFlow(entry_point="train.py").model_data


DISTRIBUTIONS = [
    ({}, 1, None, {}),
    ({"parameter_server": {"enabled": False}}, 1, None, {}),
    ({"mpi": None, "smdistributed": None}, 1, None, {}),
    ({"smdistributed": {"dataparallel": None}}, 1, None, {}),
    (
        {"parameter_server": {"enabled": True}},
        1,
        "auto",
        {"sagemaker_parameter_server_enabled": True},
    ),
    (
        {"multi_worker_mirrored_strategy": {"enabled": True}},
        2,
        "1",
        {"sagemaker_multi_worker_mirrored_strategy_enabled": True},
    ),
    (
        {"mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-x A"}},
        1,
        "2",
        {
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 2,
            "sagemaker_mpi_custom_mpi_options": "-x A",
        },
    ),
    (
        {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}},
        1,
        "auto",
        {"mp_parameters": {"partitions": 2}},
    ),
    (
        {"smdistributed": {"dataparallel": {"enabled": True}}},
        1,
        str(topology.default_count()),
        {},
    ),
    ({"nanotf": {"processes_per_host": 2}}, 1, "2", {}),
]


@pytest.mark.parametrize(("distribution", "hosts", "number", "passed"), DISTRIBUTIONS)
def test_distribution(
    distribution: dict[str, Any],
    hosts: int,
    number: str | None,
    passed: dict[str, Any],
    requests: list[JobRequest],
) -> None:
    request = _fit(requests, distribution=distribution, instance_count=hosts, model_dir=False)
    assert request.num_processes == number
    assert request.hyperparameters == passed


@pytest.mark.parametrize(
    ("distribution", "hosts", "are_ranks"),
    [
        ({"mpi": {"enabled": True, "processes_per_host": 2}}, 1, True),
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, 1, True),
        ({"mpi": {"enabled": True}}, 2, True),
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, 2, True),
        ({"nanotf": {"processes_per_host": 2}}, 1, False),
        ({"multi_worker_mirrored_strategy": {"enabled": True}}, 1, False),
    ],
)
def test_kinds_that_start_ranks(
    distribution: dict[str, Any], hosts: int, are_ranks: bool, requests: list[JobRequest]
) -> None:
    assert _fit(requests, distribution=distribution, instance_count=hosts).ranks == are_ranks


@pytest.mark.parametrize("given", [{}, {"processes_per_host": 0}, 2])
def test_workers_need_a_number(given: Any, requests: list[JobRequest]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"processes_per_host.*Received: nanotf="):
        _fit(requests, distribution={"nanotf": given})


def test_num_processes_wins(requests: list[JobRequest]) -> None:
    mpi = {"mpi": {"enabled": True, "processes_per_host": 2}}
    assert _fit(requests, distribution=mpi, num_processes=1).num_processes == "1"


def test_parameter_servers_are_told_once(
    requests: list[JobRequest], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nanotf"):
        for _ in range(2):
            _fit(requests, distribution={"parameter_server": {"enabled": True}})
    (line,) = caplog.records
    assert "synchronously" in line.getMessage()


def test_model_dir(requests: list[JobRequest], tmp_path: pathlib.Path) -> None:
    job = tmp_path / "jobs/a"
    mpi = {"mpi": {"enabled": True}}

    def passed(**given: Any) -> Any:
        return _fit(requests, output_path=str(tmp_path / "jobs"), **given).hyperparameters.get(
            "model_dir"
        )

    assert passed() == f"{job}/hosts/algo-1/shared/model"
    assert passed(distribution=mpi) == f"{job}/hosts/algo-1/model"
    assert passed(model_dir="s3://b/m") == "s3://b/m"
    assert passed(model_dir=False) is None
    assert passed(hyperparameters={"model_dir": "mine"}) == "mine"


def _attach(request: JobRequest, jobs: pathlib.Path) -> TensorFlow:
    """Attaches to a job that has ended."""
    job = JobFolder(jobs / request.name)
    job.path.mkdir(parents=True)
    job.write_request(request)
    job.write_state(JobState(record.COMPLETED, "Completed", Owner.this_process(), now()))
    return TensorFlow.attach(request.name, output_path=jobs, wait=False)


@pytest.mark.parametrize(
    "distribution",
    [
        {},
        {"mpi": {"enabled": True, "processes_per_host": 2}},
        {"smdistributed": {"dataparallel": {"enabled": True}}},
        {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}},
        {"mpi": {"enabled": True}, "nanotf": {"processes_per_host": 2}},
    ],
)
def test_an_attached_estimator_repeats_the_job(
    distribution: dict[str, Any], requests: list[JobRequest], tmp_path: pathlib.Path
) -> None:
    before = _fit(requests, distribution=distribution, model_dir="mine", output_path=tmp_path)
    _attach(before, tmp_path).fit(wait=False, job_name="a")
    assert (requests[1].num_processes, requests[1].ranks) == (before.num_processes, before.ranks)
    assert requests[1].hyperparameters == before.hyperparameters


@pytest.mark.parametrize("distribution", [{}, {"mpi": {"enabled": True}}])
def test_a_job_after_attach_has_a_model_dir_of_its_own(
    distribution: dict[str, Any], requests: list[JobRequest], tmp_path: pathlib.Path
) -> None:
    jobs, link = tmp_path / "jobs", tmp_path / "link"
    jobs.mkdir()
    link.symlink_to(jobs)
    estimator = _attach(_fit(requests, distribution=distribution, output_path=jobs), link)
    assert estimator.hyperparameters() == {}
    estimator.fit(wait=False, job_name="b")
    first, second = (request.hyperparameters["model_dir"] for request in requests)
    assert second == first.replace(str(jobs / "a"), str(link / "b"))


def test_names_of_jobs(requests: list[JobRequest]) -> None:
    estimator = TensorFlow(entry_point="train.py", base_job_name="my_job")
    estimator.fit(wait=False)
    estimator.fit(wait=False, job_name="b")
    assert requests[0].name.startswith("my-job-20")
    assert [job.name for job in estimator.jobs] == [requests[0].name, "b"]
    assert estimator.latest_training_job is estimator.jobs[1]


def test_hyperparameters_can_be_set(requests: list[JobRequest]) -> None:
    estimator = TensorFlow(entry_point="train.py", hyperparameters={"a": 1}, model_dir=False)
    estimator.set_hyperparameters(b=2)
    estimator.fit(wait=False)
    assert requests[0].hyperparameters == estimator.hyperparameters() == {"a": 1, "b": 2}


def test_remote_output_is_uploaded(requests: list[JobRequest]) -> None:
    pytest.importorskip("fsspec")
    assert _fit(requests, output_path="memory://results").upload == "memory://results"
    assert _fit(requests, output_path="file:///tmp/x").upload is None


def test_inputs() -> None:
    shuffled = TrainingInput(
        "d", input_mode="Pipe", shuffle_config=ShuffleConfig(3), compression="Gzip"
    )
    assert as_channels(None, "File") == ()
    assert as_channels("d", "File") == (DataChannel("training", "d"),)
    assert as_channels(TrainingInput("d"), "Pipe") == (DataChannel("training", "d", "Pipe"),)
    assert as_channels({"a": pathlib.Path("d"), "b": shuffled}, "File") == (
        DataChannel("a", "d"),
        DataChannel("b", "d", "Pipe", compression="Gzip", shuffle=3),
    )


@pytest.mark.parametrize("inputs", [3, {"a": 3}, {3: "a"}])
def test_other_inputs(inputs: Any) -> None:
    with pytest.raises(InvalidArgumentTypeError, match="`inputs` must be a path"):
        as_channels(inputs, "File")


def test_manifests() -> None:
    with pytest.raises(UnavailableError, match="no manifests"):
        TrainingInput("d", s3_data_type="ManifestFile")
