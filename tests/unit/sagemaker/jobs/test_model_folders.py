"""The model of a job: from SM_MODEL_DIR, else from the script's `model_dir`."""

from __future__ import annotations

import pathlib
import tarfile
from collections.abc import Callable

import pytest

from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.jobs import archives, follow, launch
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.source import SourceCode


@pytest.fixture
def ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str | None], JobFolder]:
    """Makes jobs whose scripts got a `model_dir`."""
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    (tmp_path / "train.py").touch()
    source = SourceCode(str(tmp_path / "train.py"))

    def job(model_dir: str | None) -> JobFolder:
        values = {} if model_dir is None else {"model_dir": model_dir}
        return launch.start(JobRequest("a", source, hyperparameters=values), tmp_path / "jobs")

    return job


def _write(folder: pathlib.Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("the model")


def _packed(job: JobFolder) -> list[str] | None:
    if not archives.pack(archives.model_folders(job, job.read_request()), job.model):
        assert not job.model.exists()
        return None
    with tarfile.open(job.model) as tar:
        return tar.getnames()


def test_the_model_folder_comes_first(ended: Callable[[str], JobFolder]) -> None:
    job = ended("/opt/ml/shared/model")
    _write(job.shared_model, "other")
    _write(job.tree("algo-1").model, "m")
    assert _packed(job) == ["m"]


def test_model_dir_inside_the_job_is_packed(
    ended: Callable[[str], JobFolder], tmp_path: pathlib.Path
) -> None:
    """The estimator passes this one, as local mode does."""
    job = ended(str(tmp_path / "jobs/a/hosts/algo-1/shared/model"))
    assert _packed(job) is None
    assert follow.told_of_model(job) == ""
    _write(job.shared_model, "m")
    assert _packed(job) == ["m"]


def test_paths_as_the_script_sees_them(ended: Callable[[str], JobFolder]) -> None:
    job = ended("out")  # in its working directory
    _write(job.code / "out", "m")
    assert _packed(job) == ["m"]


def test_the_whole_job_is_not_packed(ended: Callable[[str], JobFolder]) -> None:
    assert _packed(ended("/opt/ml")) is None


@pytest.mark.parametrize("address", ["s3://bucket/model", "{tmp}/mine"])
def test_model_dir_outside_the_job_is_named(
    ended: Callable[[str], JobFolder], tmp_path: pathlib.Path, address: str
) -> None:
    address = address.format(tmp=tmp_path)
    _write(tmp_path / "mine", "m")
    job = ended(address)
    assert _packed(job) is None
    assert follow.told_of_model(job).endswith(f"the script's model_dir: {address}")
