"""The supervisor's own duties, without a script: a full disk, the text of a failure."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
from typing import Any

import pytest

from nanotf.errors import JobError
from nanotf.sagemaker.detached import detached_supervisor, following, log_files, starting
from nanotf.sagemaker.jobs import failure, follow, launch, record
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.sagemaker.jobs.supervisor import JobSupervisor


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Program:
    name = "algo-1"


@pytest.fixture
def job(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    (tmp_path / "train.py").touch()
    return launch.start(JobRequest("a", SourceCode(str(tmp_path / "train.py"))), tmp_path / "jobs")


def test_a_full_disk_shortens_the_log_alone(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = JobSupervisor(job)
    with monkeypatch.context() as patches:
        patches.setattr(log_files.os, "open", _full)
        for _ in range(2):
            owner._write_line(_Program(), b"a line\n", False)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("the log is incomplete: [Errno 28] No space left") == 1
    assert not job.log("algo-1").exists()


def test_a_full_disk_leaves_the_state(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = JobSupervisor(job)
    with monkeypatch.context() as patches:
        patches.setattr(JobFolder, "write_state", _full)
        owner._become(phase="Training")
    assert "the state of the job cannot be written now" in capsys.readouterr().err
    assert job.read_state().phase == "Starting"
    owner._become(phase="Uploading")
    assert job.read_state().phase == "Uploading"


def test_the_final_state_waits_for_room(job: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, tries = JobSupervisor(job), []
    write = JobFolder.write_state

    def full_at_first(self: JobFolder, state: JobState) -> None:
        tries.append(state)
        if len(tries) < 3:
            _full()
        write(self, state)

    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(JobFolder, "write_state", full_at_first)
    owner._end_as(record.COMPLETED, record.COMPLETED, None)
    assert len(tries) == 3
    assert job.read_state().status == record.COMPLETED


def test_a_job_that_the_launching_process_gave_up(job: JobFolder) -> None:
    state = job.read_state()
    job.write_state(dataclasses.replace(state, status=record.FAILED))
    with pytest.raises(JobError, match="a job that has not ended"):
        JobSupervisor(job).take_over()


def test_a_job_that_is_stopped_before_its_script_begins(job: JobFolder) -> None:
    owner = JobSupervisor(job)
    owner.take_over()
    owner._on_signal()
    owner.run()
    state = job.read_state()
    assert (state.status, state.exit_codes, state.started) == (record.STOPPED, {}, None)


def test_the_launching_process_is_never_stopped(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid is the owner's until the supervisor takes over."""
    monkeypatch.setattr(following, "_STOP_SECONDS", 0.0)
    monkeypatch.setattr(following.os, "kill", lambda *_: pytest.fail("a signal was sent"))
    with pytest.raises(JobError, match=f"which process {os.getpid()} still prepares"):
        follow.stop(job)


def test_texts_of_failures() -> None:
    command = ["python", "t.py", "--a", "x y"]
    assert failure.of_script(1, "boom", command) == (
        'ExecuteUserScriptError:\nExitCode 1\nErrorMessage "boom"\nCommand "python t.py --a x y"'
    )
    assert failure.of_script(137, "", command) == (
        'ExecuteUserScriptError:\nExitCode 137\nErrorMessage ""\n'
        'ExtraInfo "OutOfMemory: Process killed by SIGKILL (signal 9)"\n'
        'Command "python t.py --a x y"'
    )
    assert failure.of_framework("Traceback") == "Framework Error: \nTraceback"


def test_the_text_of_the_script_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "failure"
    assert failure.write(path, "x" * 2000) == "x" * 1024
    assert failure.write(path, "another") == "x" * 1024
    assert path.read_text() == "x" * 2000
