"""A job on disk: names, states, owners that were killed, a full disk."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import re
import subprocess
import sys

import pytest

from nanotf.cli import main
from nanotf.errors import InvalidArgumentError, JobError, UnavailableError
from nanotf.machine import process_identity
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.jobs import record
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.wire import files


def _job(folder: pathlib.Path, owner: Owner, status: str = record.IN_PROGRESS) -> JobFolder:
    job = JobFolder(folder / "a")
    job.path.mkdir()
    job.write_state(JobState(status, "Training", owner, now()))
    return job


def _ended_owner() -> Owner:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(child.pid, str(process_identity.start_of(child.pid)), Owner.this_process().node)
    assert owner.is_alive()
    child.communicate()
    return owner


def test_names_have_the_time_in_utc() -> None:
    name = record.KIND.make_name("my_train.v2")
    assert re.fullmatch(r"my-train-v2-\d{4}(-\d\d){5}-\d{3}", name)
    long = record.KIND.make_name("x" * 80)
    assert len(long) == 63
    for each in (name, long, record.KIND.make_name("***")):
        record.KIND.check_name(each)


@pytest.mark.parametrize("name", ["", "a_b", "-a", "a-", "x" * 64, "../a"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="1 to 63 letters, digits and dashes"):
        record.KIND.check_name(name)


def test_request_survives_the_disk(tmp_path: pathlib.Path) -> None:
    request = JobRequest(
        "a",
        SourceCode("train.py", "src", ("lib",)),
        hyperparameters={"a": [1, None], "b": {"c": True}},
        channels=(DataChannel("train", "/d", "Pipe", shuffle=1),),
        num_processes="2",
        metrics=(Metric("m", "(.)"),),
        environment={"A": "b"},
    )
    JobFolder(tmp_path).write_request(request)
    assert JobFolder(tmp_path).read_request() == request


def test_hosts_are_sorted_as_texts() -> None:
    names = JobRequest("a", SourceCode("t.py"), instances=10).host_names
    assert names[:3] == ["algo-1", "algo-10", "algo-2"]


def test_a_job_of_a_living_owner_is_in_progress(tmp_path: pathlib.Path) -> None:
    job = _job(tmp_path, Owner.this_process())
    assert job.read_state().status == record.IN_PROGRESS


@pytest.mark.parametrize("status", [record.IN_PROGRESS, record.STOPPING])
def test_a_job_whose_owner_was_killed_has_failed(status: str, tmp_path: pathlib.Path) -> None:
    owner = _ended_owner()
    state = _job(tmp_path, owner, status).read_state()
    assert (state.status, state.is_final) == (record.FAILED, True)
    assert f"(process {owner.pid}) ended without recording an end" in str(state.failure_reason)


def test_another_process_with_the_pid_is_not_the_owner(tmp_path: pathlib.Path) -> None:
    owner = dataclasses.replace(Owner.this_process(), start="another")
    assert _job(tmp_path, owner).read_state().status == record.FAILED


def test_an_owner_on_another_machine_is_believed(tmp_path: pathlib.Path) -> None:
    owner = dataclasses.replace(_ended_owner(), node="another")
    assert _job(tmp_path, owner).read_state().status == record.IN_PROGRESS


def test_a_final_state_needs_no_owner(tmp_path: pathlib.Path) -> None:
    job = _job(tmp_path, _ended_owner(), record.COMPLETED)
    assert job.read_state().status == record.COMPLETED


def test_a_full_disk_leaves_the_record_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(tmp_path, Owner.this_process())
    before = (job.path / "state.json").read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        job.write_state(JobState(record.COMPLETED, "Completed", Owner.this_process(), now()))
    assert (job.path / "state.json").read_bytes() == before
    assert [path.name for path in job.path.iterdir()] == ["state.json"]


def test_folder_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record.KIND.folder(None) == pathlib.Path("jobs").absolute()
    monkeypatch.setenv("NANOTF_JOBS", "/elsewhere")
    assert record.KIND.folder(None) == pathlib.Path("/elsewhere")
    assert record.KIND.folder("/mine") == pathlib.Path("/mine")


def test_a_job_that_does_not_exist(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Received: x, which is not in {tmp_path}"):
        record.find("x", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "9" * 5000,
        "[" * 100_000,
        "{}",
        '{"owner": 1}',
        "\x00",
        '{"owner": {}}',
    ],
)
def test_damaged_records(content: str, tmp_path: pathlib.Path) -> None:
    job = _job(tmp_path, Owner.this_process())
    for name, read in {"state.json": job.read_state, "request.json": job.read_request}.items():
        (job.path / name).write_text(content)
        with pytest.raises(JobError, match=rf"Received: .*{name}"):
            read()


def test_one_damaged_state_hides_no_other_job(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(tmp_path, Owner.this_process())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "state.json").write_text("{")
    assert main(["jobs", "list", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert job.name in said.out and str(tmp_path / "b" / "state.json") in said.err
    assert main(["jobs", "describe", "b", "--output", str(tmp_path)]) == 2


def test_only_the_user_reads_a_job(tmp_path: pathlib.Path) -> None:
    job = _job(tmp_path, Owner.this_process())
    job.write_request(
        JobRequest("a", SourceCode("train.py"), hyperparameters={"api_key": "secret"})
    )
    for name in ("state.json", "request.json"):
        assert (job.path / name).stat().st_mode & 0o777 == 0o600


def test_a_system_that_does_not_tell_when_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_identity, "start_of", lambda pid: None)
    with pytest.raises(UnavailableError, match="Mount a whole /proc"):
        Owner.this_process()
