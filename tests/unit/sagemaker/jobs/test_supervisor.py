"""The supervisor's own duties, without a script: a full disk, the text of a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
from typing import Any

import pytest

from nanotf.errors import JobError
from nanotf.sagemaker.detached import detached_supervisor, following, starting
from nanotf.sagemaker.jobs import archives, failure, follow, launch, metrics, record, results
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.sagemaker.jobs.supervisor import JobSupervisor
from nanotf.wire import files, log_files


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _broken(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class _Program:
    name = "algo-1"


@pytest.fixture
def job(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    (tmp_path / "train.py").touch()
    return launch.start(JobRequest("a", SourceCode(str(tmp_path / "train.py"))), tmp_path / "jobs")


def test_the_log_and_the_metrics_wait_for_room(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = dataclasses.replace(job.read_request(), metrics=(Metric("loss", "loss: ([0-9.]+)"),))
    job.write_request(request)
    owner = JobSupervisor(job)
    with monkeypatch.context() as patches:
        patches.setattr(log_files.os, "open", _full)
        for number in range(2):
            owner._write_line(_Program(), b"loss: %d\n" % number, False)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("the log waits for room: [Errno 28] No space left") == 1
    assert not job.log("algo-1").exists()
    assert owner._catch_up()
    assert job.log("algo-1").read_text() == "loss: 0\nloss: 1\n"
    assert [found["value"] for found in metrics.read(job.metrics)] == [0.0, 1.0]


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


def test_a_disk_that_stays_read_only_ends_the_wait_for_it(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, told = JobSupervisor(job), []
    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(detached_supervisor, "_END_SECONDS", 0.0)
    monkeypatch.setattr(detached_supervisor.syslog, "syslog", lambda _, text: told.append(text))
    monkeypatch.setattr(JobFolder, "write_state", _broken)
    owner._end_as(record.COMPLETED, record.COMPLETED, None)
    assert len(told) == 1 and "ended with status Completed, but " in told[0]
    assert "Input/output error" in told[0] and told[0] in capsys.readouterr().err


def test_a_disk_that_fails_otherwise_does_not_end_a_job(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may be away for a moment."""
    owner = JobSupervisor(job)
    with monkeypatch.context() as patches:
        patches.setattr(files.os, "open", _broken)
        owner._become(phase="Training")
    owner._catch_up()
    assert job.read_state().phase == "Training"


def test_a_supervisor_waits_for_room_at_its_start(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is none for long, the launching process gets an error."""
    owner, tries, write = JobSupervisor(job), [], JobFolder.write_state

    def full_at_first(self: JobFolder, state: JobState) -> None:
        tries.append(state)
        if len(tries) < 3:
            _full()
        write(self, state)

    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(JobFolder, "write_state", full_at_first)
    owner.take_over()
    assert job.read_state().owner.is_supervisor
    monkeypatch.setattr(detached_supervisor, "_START_SECONDS", -1.0)
    monkeypatch.setattr(JobFolder, "write_state", _full)
    with pytest.raises(OSError, match="No space left"):
        owner.take_over()


def test_a_job_whose_folder_was_deleted_ends(job: JobFolder) -> None:
    owner = JobSupervisor(job)
    shutil.rmtree(job.path)
    owner._end_as(record.COMPLETED, record.COMPLETED, None)


def test_results_wait_for_room(job: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state says it meanwhile, and whoever waits for the job is told."""
    (job.tree("algo-1").model / "m").touch()
    owner, notices, pack = JobSupervisor(job), [], archives.pack

    def full_at_first(folders: Any, archive: pathlib.Path) -> bool:
        notices.append(job.notice_of(job.read_state()))
        return pack(folders, archive) if len(notices) > 2 else _full()

    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(archives, "pack", full_at_first)
    owner._finish()
    state = job.read_state()
    assert (state.status, state.waiting, job.model.is_file()) == (record.COMPLETED, None, True)
    assert notices[0] is None
    assert "the model.tar.gz of the job cannot be written now: [Errno 28]" in str(notices[1])


def test_results_that_never_fit_are_kept_and_named(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(detached_supervisor, "_ROOM_SECONDS", -1.0)
    monkeypatch.setattr(archives, "pack", _full)
    JobSupervisor(job)._finish()
    state = job.read_state()
    assert state.status == record.FAILED
    assert "No space left on device, for " in str(state.failure_reason)
    assert f"kept in {job.tree('algo-1').model}." in str(state.failure_reason)


def test_a_stop_ends_an_upload(job: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose library catches each `Exception` and tries again."""
    owner = JobSupervisor(job)

    def uploads(*_: Any) -> Any:
        for _ in range(2):
            with contextlib.suppress(Exception):
                owner._on_signal()
        pytest.fail("the upload continued")

    monkeypatch.setattr(results, "upload", uploads)
    owner._finish()
    assert job.read_state().status == record.STOPPED


def test_a_job_that_the_launching_process_gave_up(job: JobFolder) -> None:
    state = job.read_state()
    job.write_state(dataclasses.replace(state, status=record.FAILED))
    with pytest.raises(JobError, match="a job that has not ended"):
        JobSupervisor(job).take_over()


def test_a_job_that_the_launching_process_gives_up_while_the_disk_is_full(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, write, given_up = JobSupervisor(job), JobFolder.write_state, []

    def full_at_first(self: JobFolder, state: JobState) -> None:
        if not given_up:
            given_up.append(dataclasses.replace(state, status=record.FAILED))
            write(self, given_up[0])
            _full()
        write(self, state)

    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(JobFolder, "write_state", full_at_first)
    with pytest.raises(JobError, match="a job that has not ended"):
        owner.take_over()
    assert job.read_state() == given_up[0]


@pytest.mark.parametrize("part", ["state", "log"])
def test_who_follows_a_job_waits_for_a_disk_that_does_not_answer(
    part: str, job: JobFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, looks = files.read_json, []

    def look(path: pathlib.Path) -> Any:
        looks.append(path)
        if part == "state" and len(looks) in (2, 3):
            _broken()
        if len(looks) == 5:
            job.write_state(dataclasses.replace(job.read_state(), status=record.FAILED))
        return read(path)

    def rest() -> str:
        return _broken() if part == "log" and len(looks) == 2 else "said\n"

    printed: list[str] = []
    monkeypatch.setattr(files, "read_json", look)
    state = following.wait(job, printed.append, rest, pause=0.0)
    assert state.status == record.FAILED and printed
    assert caplog.text.count("This process waits for that.") == 1


def test_what_was_read_of_a_log_before_its_disk_fails_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    tail = log_files.LogTail(path)
    assert tail.read() == "one\n"
    path.write_text("one\ntwo\n")
    path.rename(log_files._before(path))
    path.write_text("three\n")
    read = log_files.LogTail._read

    def fails(self: log_files.LogTail, place: pathlib.Path) -> bytes:
        return read(self, place) if place != path else _broken()

    with monkeypatch.context() as patches, pytest.raises(OSError, match="Input/output error"):
        patches.setattr(log_files.LogTail, "_read", fails)
        tail.read()
    assert tail.read() == "two\nthree\n"


def test_hosts_whose_log_was_read_before_that_of_another_fails(job: JobFolder) -> None:
    reader = follow.LogReader(job)
    job.log("algo-1").write_text("one\n")
    first = reader._tails[0]

    class Failing:
        reads = 0

        def read(self) -> str:
            self.reads += 1
            return _broken() if self.reads == 1 else "two\n"

    reader._tails = [first, Failing()]  # type: ignore[list-item]
    with pytest.raises(OSError, match="Input/output error"):
        reader.read()
    assert reader.read() == "one\ntwo\n"


def test_a_disk_that_does_not_answer_at_first_is_told(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "read_json", _broken)
    with pytest.raises(JobError, match=r"must be readable. Received: .*Input/output error"):
        following.wait(job, None, str)


def test_who_follows_a_job_that_is_deleted_ends(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(_: float) -> None:
        shutil.rmtree(job.path)

    monkeypatch.setattr(following.time, "sleep", delete)
    with pytest.raises(JobError, match=r"Received: .*No such file"):
        following.wait(job, None, str)


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
    for lacked_memory, word in ((True, "OutOfMemory: "), (False, "")):
        assert failure.of_script(137, "", command, lacked_memory=lacked_memory) == (
            'ExecuteUserScriptError:\nExitCode 137\nErrorMessage ""\n'
            f'ExtraInfo "{word}Process killed by SIGKILL (signal 9)"\n'
            'Command "python t.py --a x y"'
        )
    assert failure.of_framework("Traceback") == "Framework Error: \nTraceback"


def test_the_text_of_the_script_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "failure"
    text = f"Exception during training: {'x' * 2000}\nValueError: the end"
    reason = failure.write(path, text)
    assert failure.write(path, "another") == reason
    assert path.read_text() == text


def test_a_reason_has_the_end_of_a_traceback() -> None:
    frames = "  a frame\n" * 200
    text = f"Traceback (most recent call last):\n{frames}ValueError: why"
    reason = failure.reason_of(text)
    assert len(reason) == 1024
    assert reason.startswith("Traceback")
    assert reason.endswith("ValueError: why")
    assert failure.reason_of("short") == "short"
    arguments = ["python", "t.py", *["--name", "value"] * 100]
    assert "600 x" in failure.reason_of(failure.of_script(1, f"{'x' * 594} 600 x", arguments))


class _Ended(_Program):
    is_running, is_helper = False, False

    def __init__(self, name: str, exit_code: int) -> None:
        self.name, self.exit_code = name, exit_code


@pytest.mark.parametrize(
    ("codes", "failed"),
    [((1, 137), "algo-2"), ((1, 0), "algo-1"), ((0, 0), None), ((137, 0), "algo-1")],
)
def test_the_first_host_that_failed(
    codes: tuple[int, int], failed: str | None, job: JobFolder
) -> None:
    """The first host's script also fails when another host does, in the same moment."""
    owner = JobSupervisor(job)
    programs = [_Ended(f"algo-{n}", code) for n, code in enumerate(codes, 1)]
    owner._programs = programs  # type: ignore[assignment]
    owner._note_failure()
    assert (None if owner._failed is None else owner._failed.name) == failed
