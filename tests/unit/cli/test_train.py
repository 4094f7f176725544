"""`nanotf train` and `nanotf jobs`: wrong arguments, empty folders. Real jobs: e2e/test_jobs.py."""

from __future__ import annotations

import pathlib

import pytest

from nanotf import console
from nanotf.cli import main, train
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.jobs import record


@pytest.fixture(autouse=True)
def _folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "no.py"], "The script must be a file. Received: no.py"),
        (["train", "train.py", "-p", "epochs"], "name=value. Received: -p epochs"),
        (["train", "train.py", "--channel", "x"], "name=source. Received: --channel x"),
        (["train", "train.py", "--channel", "x=no"], "data must exist. Received: no"),
        (["train", "train.py", "--metric", "x=y"], "must have a group"),
        (["train", "train.py", "--name", "a_b"], "letters, digits and dashes"),
        (["train", "train.py", "-n", "x"], "-n must be a whole number"),
        (["train", "train.py", "--instances", "x"], "--instances"),
        (["jobs", "stop", "x"], "The job must exist. Received: x"),
        (["jobs", "logs", "../x"], "letters, digits and dashes"),
        (["jobs"], "ACTION"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("nanotf: ")
    assert text in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_no_jobs(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["jobs", "list"]) == 0
    assert capsys.readouterr().out == f"No jobs in {tmp_path}/jobs.\n"
    assert main(["jobs", "list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, "2 processes that srun has started"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "4 processes that mpirun has started"),
    ],
)
def test_a_launcher_that_would_start_the_job_several_times(
    variables: dict[str, str],
    text: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "train.py"]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_failure_that_the_log_shows_is_not_repeated(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    state = record.JobState(
        status=record.FAILED,
        phase=record.FAILED,
        owner=record.Owner.this_process(),
        created=now(),
        exit_codes={"algo-1": 7},
        failure_reason="ExitCode 7\nErrorMessage: a traceback",
        failure_beside_log="ExitCode 7",
    )
    for logs, text in ((True, state.failure_beside_log), (False, state.failure_reason)):
        assert train.report_end(record.JobFolder(tmp_path / "a"), state, logs=logs) == 7
        assert capsys.readouterr().err == console.prefixed(f"job a failed: {text}") + "\n"
