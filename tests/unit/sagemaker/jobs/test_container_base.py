"""`/opt/ml` where the kernel refuses private mounts: a link, or a refusal before the start."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import pytest

from nanotf.errors import InvalidArgumentError, JobError
from nanotf.machine import private_mounts
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.jobs import container_base, launch, record
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.source import SourceCode


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Stands for /opt/ml, on a machine whose kernel refuses; it does not exist."""
    place = tmp_path / "opt/ml"
    place.parent.mkdir()
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    monkeypatch.setattr(container_base, "CONTAINER_BASE", str(place))
    monkeypatch.setattr(container_base, "_ask_kernel", lambda _: "no user namespaces")
    monkeypatch.setattr(private_mounts, "try_out", lambda _: "no user namespaces")
    return place


def _request(
    folder: pathlib.Path, text: str = "open('/opt/ml/model/m')", **more: Any
) -> JobRequest:
    (folder / "train.py").write_text(text)
    return JobRequest(more.pop("name", "a"), SourceCode(str(folder / "train.py")), **more)


def _end(job: JobFolder) -> None:
    job.write_state(dataclasses.replace(job.read_state(), status=record.COMPLETED))


def test_a_link_while_the_job_runs(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    request = _request(tmp_path)
    job = launch.start(request, tmp_path / "jobs")
    with container_base.provided(job, request) as places:
        assert places == {}
        assert place.readlink() == job.tree("algo-1").base
        with pytest.raises(InvalidArgumentError, match="a link of the job a, which runs"):
            launch.start(dataclasses.replace(request, name="b"), tmp_path / "jobs")
    assert not os.path.lexists(place)


def test_the_link_of_a_job_that_was_killed(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    request = _request(tmp_path)
    job = launch.start(request, tmp_path / "jobs")
    _end(job)
    place.symlink_to(job.tree("algo-1").base)
    request = dataclasses.replace(request, name="b")
    job = launch.start(request, tmp_path / "jobs")
    with container_base.provided(job, request):
        assert place.readlink() == job.tree("algo-1").base
    assert not os.path.lexists(place)


def test_a_folder_of_somebody_else(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    place.mkdir()
    given: dict[str, Any]
    for given in (
        {},
        {"text": "1", "hyperparameters": {"out": "/opt/ml/model"}},
        {"text": "1", "environment": {"OUT": "/opt/ml"}},
    ):
        with pytest.raises(
            InvalidArgumentError, match=r"no user namespaces.*exists and is not the"
        ):
            launch.start(_request(tmp_path, **given), tmp_path / "jobs")
        assert not (tmp_path / "jobs/a").exists()
    # Code that does not name it runs, and never sees it.
    request = _request(tmp_path, "open('/opt/mlflow')")
    job = launch.start(request, tmp_path / "jobs")
    with container_base.provided(job, request) as places:
        assert places == {}
    assert list(place.iterdir()) == []


def test_the_supervisor_finds_the_hurdle(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    request = _request(tmp_path)
    job = launch.start(request, tmp_path / "jobs")
    place.symlink_to("/tmp")  # made since
    with (
        pytest.raises(JobError, match=r"train.py names it.*a link of somebody else's"),
        container_base.provided(job, request),
    ):
        pass
    assert place.is_symlink()


def test_data_that_the_mount_would_hide(
    place: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_base, "_ask_kernel", lambda _: None)
    (place / "data").mkdir(parents=True)
    channel = DataChannel("train", str(place / "data"))
    with pytest.raises(
        InvalidArgumentError, match=r"would hide .*/opt/ml/data, which the job needs"
    ):
        launch.start(_request(tmp_path, channels=(channel,)), tmp_path / "jobs")


def test_a_link_to_itself(
    place: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_base, "_ask_kernel", lambda _: None)
    place.symlink_to(place.name)
    launch.start(_request(tmp_path), tmp_path / "jobs")


def test_names_of_hosts(
    place: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_mounts, "try_out", lambda _: None)
    request = _request(tmp_path, instances=2)
    job = launch.start(request, tmp_path / "jobs")
    with container_base.provided(job, request) as places:
        assert [found[str(place)] for found in places.values()] == [
            str(job.tree(host).base) for host in ("algo-1", "algo-2")
        ]
        names = pathlib.Path(places["algo-1"]["/etc/hosts"]).read_text()
    assert names.startswith("127.0.0.1\talgo-1\n127.0.0.2\talgo-2\n")
    assert names.endswith(pathlib.Path("/etc/hosts").read_text())
    # Real hosts have addresses of their own.
    request = dataclasses.replace(request, name="b", instances=1, hosts="h1,h2")
    job = launch.start(request, tmp_path / "jobs")
    with container_base.provided(job, request) as places:
        assert "/etc/hosts" not in places["algo-1"]
