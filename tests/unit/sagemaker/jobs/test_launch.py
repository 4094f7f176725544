"""Requests that cannot be met: refused before a process starts, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from nanotf.errors import InvalidArgumentError, JobError, NanoError
from nanotf.machine.interpreter import nanotf_command
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.jobs import launch
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.source import SourceCode, command, shown
from nanotf.wire import files


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[JobFolder]:
    """The jobs whose supervisors would have been started."""
    found: list[JobFolder] = []
    monkeypatch.setattr(starting, "start_supervisor", lambda job, module: found.append(job))
    return found


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return path


def _refused(request: JobRequest, output: pathlib.Path, text: str) -> None:
    with pytest.raises(NanoError, match=text):
        launch.start(request, output)
    assert not (output / request.name).exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "a b"}, "1 to 63 letters"),
        (
            {"source": SourceCode("no.py")},
            r"The script must be a file. Received: no.py \(no such file",
        ),
        ({"source": SourceCode(".")}, "a directory"),
        ({"source": SourceCode("t.py", "/no/such")}, "data must exist. Received: /no/such"),
        ({"channels": (DataChannel("train", "/no/such"),)}, "data must exist. Received: /no/such"),
        ({"metrics": (Metric("a", "b"),)}, "must have a group"),
        ({"hyperparameters": {"a": object()}}, "Received: a=<object"),
        ({"num_processes": "two"}, "-n must be a whole number, or 'auto'. Received: -n two"),
        ({"num_processes": "0"}, "num_processes"),
        ({"num_processes": "100000"}, "100000"),
        ({"instances": 0}, "1 to 200 instances. Received: 0"),
        ({"instances": 2, "hosts": "a,b"}, "real hosts or on simulated ones"),
        ({"max_run": 0.0}, "`max_run` must be a number of seconds above 0. Received: max_run=0.0"),
        ({"max_run": float("nan")}, "Received: max_run=nan"),
    ],
)
def test_bad_requests(
    changes: dict[str, Any],
    text: str,
    script: pathlib.Path,
    tmp_path: pathlib.Path,
    started: list[JobFolder],
) -> None:
    request = dataclasses.replace(JobRequest("a", SourceCode(str(script))), **changes)
    _refused(request, tmp_path / "jobs", text)
    assert started == []


def test_several_hosts_run_python(tmp_path: pathlib.Path, started: list[JobFolder]) -> None:
    (tmp_path / "train.sh").write_text("")
    request = JobRequest("a", SourceCode(str(tmp_path / "train.sh")), instances=2)
    _refused(request, tmp_path / "jobs", "Several hosts run Python scripts only")


def test_a_missing_dependency(
    script: pathlib.Path, tmp_path: pathlib.Path, started: list[JobFolder]
) -> None:
    request = JobRequest("a", SourceCode(str(script), dependencies=("/no/such",)))
    _refused(request, tmp_path / "jobs", "A dependency must be a file or a folder")


def test_a_name_in_use(
    script: pathlib.Path, tmp_path: pathlib.Path, started: list[JobFolder]
) -> None:
    request = JobRequest("a", SourceCode(str(script)))
    job = launch.start(request, tmp_path / "jobs")
    before = sorted(job.path.rglob("*"))
    with pytest.raises(InvalidArgumentError, match=r"must be new. Received: a, which is in use"):
        launch.start(request, tmp_path / "jobs")
    assert sorted(job.path.rglob("*")) == before
    assert started == [job]


def test_a_folder_that_cannot_be_made(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    for output in ("file", "file/jobs"):
        with pytest.raises(
            InvalidArgumentError, match=r"A job needs a folder .*file.*Choose another --output\."
        ):
            launch.start(JobRequest("a", SourceCode(str(script))), tmp_path / output)


@pytest.mark.parametrize("module, function", [(files.os, "fsync"), (shutil, "copy2")])
def test_a_full_disk(
    module: Any,
    function: str,
    script: pathlib.Path,
    tmp_path: pathlib.Path,
    started: list[JobFolder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, function, full)
    request = JobRequest("a", SourceCode(str(script)))
    with pytest.raises(JobError, match=r"room on the disk.*No space left on device"):
        launch.start(request, tmp_path / "jobs")
    assert list((tmp_path / "jobs").iterdir()) == []
    assert started == []


def test_a_supervisor_that_does_not_start(
    script: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        options["stderr"].write(b"No module named nanotf\n")
        raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(starting.subprocess, "run", run)
    with pytest.raises(JobError, match=r"must start. Received: .*exit status 1.\nNo module named"):
        launch.start(JobRequest("a", SourceCode(str(script))), tmp_path / "jobs")
    state = JobFolder(tmp_path / "jobs/a").read_state()
    assert state.status == "Failed"
    assert "supervisor of the job must start" in str(state.failure_reason)


def test_ctrl_c_while_a_supervisor_starts(
    script: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: list[str], **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(starting.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        launch.start(JobRequest("a", SourceCode(str(script))), tmp_path / "jobs")
    state = JobFolder(tmp_path / "jobs/a").read_state()
    assert state.status == "Failed"
    assert "Received: KeyboardInterrupt" in str(state.failure_reason)


def test_trees_of_two_hosts(
    script: pathlib.Path, tmp_path: pathlib.Path, started: list[JobFolder]
) -> None:
    request = JobRequest("a", SourceCode(str(script)), {"epochs": 3, "opt": "adam"}, instances=2)
    job = launch.start(request, tmp_path / "jobs")
    for host in ("algo-1", "algo-2"):
        tree = job.tree(host)
        assert (tree.code / "train.py").read_text() == "print(1)\n"
        assert files.read_json(tree.input_data) == {}
        assert files.read_json(tree.resources) == {
            "current_host": host,
            "current_instance_type": "local",
            "current_group_name": "homogeneousCluster",
            "current_instance_group": "homogeneousCluster",
            "hosts": ["algo-1", "algo-2"],
            "instance_groups": [
                {
                    "instance_group_name": "homogeneousCluster",
                    "instance_type": "local",
                    "hosts": ["algo-1", "algo-2"],
                }
            ],
            "network_interface_name": "eth0",
        }
        assert files.read_json(tree.hyperparameters) == {
            "epochs": "3",
            "opt": '"adam"',
            "sagemaker_program": '"train.py"',
            "sagemaker_submit_directory": f'"{job.code}"',
            "sagemaker_container_log_level": "20",
            "sagemaker_job_name": '"a"',
        }
        tree.shared_model.joinpath(host).touch()
    assert sorted(path.name for path in job.shared_model.iterdir()) == ["algo-1", "algo-2"]


def _archive(folder: pathlib.Path) -> pathlib.Path:
    path = folder.parent / "source.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, arcname=".")
    return path


@pytest.mark.parametrize("pack", [lambda folder: folder, _archive])
def test_source_folder(
    pack: Callable[[pathlib.Path], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    folder, library = tmp_path / "src", tmp_path / "library"
    (folder / "sub").mkdir(parents=True)
    library.mkdir()
    for path in (folder / "sub/train.py", folder / "beside.py", library / "x.py"):
        path.touch()
    source = SourceCode("sub/train.py", str(pack(folder)), (str(library),))
    source.check()
    source.copy(tmp_path / "code")
    found = {str(p.relative_to(tmp_path / "code")) for p in (tmp_path / "code").rglob("*.py")}
    assert found == {"sub/train.py", "beside.py", "library/x.py"}


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz"])
def test_a_remote_source(ending: str, tmp_path: pathlib.Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    memory.pipe(f"/code/source{ending}", _archive(tmp_path / "src").read_bytes())
    try:
        SourceCode("train.py", f"memory://code/source{ending}").copy(tmp_path / "code")
    finally:
        memory.rm("/code", recursive=True)
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["train.py"]


def test_an_archive_that_reaches_outside(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").touch()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "x", arcname="../x")
    with pytest.raises(InvalidArgumentError, match=r"folder or a whole .tar.gz"):
        SourceCode("x", str(tmp_path / "a.tar.gz")).copy(tmp_path / "code")


@pytest.mark.parametrize("damage", ["cut", "one bit", "checksum", "not an archive", "absolute"])
def test_a_damaged_archive(damage: str, tmp_path: pathlib.Path) -> None:
    """Nothing of it is taken, wherever the damage is."""
    (tmp_path / "train.py").write_bytes(random.Random(0).randbytes(100_000))
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "train.py", arcname="train.py")
        if damage == "absolute":
            member = tarfile.TarInfo("/etc/x")
            tar.addfile(member)
    content = bytearray(archive.read_bytes())
    if damage == "cut":
        del content[-50_000:]
    elif damage == "one bit":
        content[50_000] ^= 4
    elif damage == "checksum":
        content[-8] ^= 1
    elif damage == "not an archive":
        content = bytearray(b"text" * 100)
    archive.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"a whole .tar.gz. Received: .*a.tar.gz"):
        SourceCode("train.py", str(archive)).copy(tmp_path / "code")
    assert not any((tmp_path / "code").iterdir())


def test_commands(tmp_path: pathlib.Path) -> None:
    def words(entry: str, run: list[str] | None = None) -> list[str]:
        return command(entry, tmp_path, "py", ["--a", "x y"], run)

    assert words("t.py") == ["py", "t.py", "--a", "x y"]
    assert words("t.py", ["-n", "2"]) == [
        *nanotf_command("py"),
        *("run", "-n", "2", "t.py", "--a", "x y"),
    ]
    shown_words = ["py", "-m", "nanotf", "run", "-n", "2", "t.py", "--a", "x y"]
    assert shown(words("t.py", ["-n", "2"])) == shown_words
    assert shown(words("t.py")) == words("t.py")
    assert words("t.sh") == ["/bin/sh", "-c", "./t.sh --a 'x y'"]
    (tmp_path / "setup.py").touch()
    assert words("sub/t.py") == ["py", "-m", "sub.t", "--a", "x y"]
