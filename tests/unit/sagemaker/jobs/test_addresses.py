"""Remote addresses, through storages of fsspec that allow little."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import addresses, follow, launch
from nanotf.sagemaker.jobs.record import JobRequest
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.sagemaker.jobs.supervisor import JobSupervisor

memory = pytest.importorskip("fsspec.implementations.memory")
fsspec = pytest.importorskip("fsspec")


class PutOnly(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A bucket in which only objects may be put."""

    protocol = "putonly"
    objects: ClassVar[dict[str, bytes]] = {}

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        if "/closed/" in rpath:
            raise PermissionError("Access Denied")
        if rpath.startswith("missing/"):
            raise FileNotFoundError("no such bucket")
        self.objects[rpath] = pathlib.Path(lpath).read_bytes()

    def _denied(self, *_: Any, **__: Any) -> Any:
        raise PermissionError("Access Denied")

    ls = info = exists = isdir = find = makedirs = mkdir = _denied


@pytest.fixture(autouse=True)
def storages() -> Iterator[None]:
    fsspec.register_implementation("putonly", PutOnly, clobber=True)
    PutOnly.objects.clear()
    yield
    memory.MemoryFileSystem.store.clear()
    memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def _remember(*paths: str) -> None:
    for path in paths:
        memory.MemoryFileSystem().pipe(path, path.encode())


def test_to_put_objects_is_enough(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x").write_bytes(b"x")
    (tmp_path / "a/y").write_bytes(b"y")
    addresses.upload(tmp_path / "a", "putonly://bucket/kept")
    addresses.upload(tmp_path / "a/y", "putonly://bucket/model.tar.gz")
    assert PutOnly.objects == {
        "bucket/kept/b/x": b"x",
        "bucket/kept/y": b"y",
        "bucket/model.tar.gz": b"y",
    }


def test_a_file_system_gets_the_folders(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").touch()
    addresses.upload(tmp_path / "x", f"local://{tmp_path}/results/a/x")
    assert (tmp_path / "results/a/x").is_file()


def test_a_bucket_that_does_not_exist_is_not_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").touch()
    monkeypatch.setattr(PutOnly, "exists", lambda *_: False)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        addresses.upload(tmp_path / "x", "putonly://missing/x")


def test_a_prefix_matches_files(tmp_path: pathlib.Path) -> None:
    """SageMaker calls it an S3Prefix. `part` is no folder here."""
    _remember("/data/part-0", "/data/part-1/x", "/data/other", "/data/a/part-2")
    addresses.download("memory://data/part", tmp_path / "got")
    found = [p.relative_to(tmp_path / "got") for p in (tmp_path / "got").rglob("*") if p.is_file()]
    assert sorted(map(str, found)) == ["part-0", "part-1/x"]
    with pytest.raises(InvalidArgumentError, match="nothing is there"):
        addresses.download("memory://data/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_and_a_file_are_as_named(tmp_path: pathlib.Path) -> None:
    _remember("/data/part/x", "/data/part-1")
    addresses.download("memory://data/part", tmp_path / "folder")
    addresses.download("memory://data/part-1", tmp_path / "file")
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["x"]
    assert [p.name for p in (tmp_path / "file").iterdir()] == ["part-1"]


def test_a_failed_upload_says_where_why_and_what_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is sent to an object that does not exist."""
    monkeypatch.setattr("nanotf.sagemaker.detached.starting.start_supervisor", lambda *_: None)
    (tmp_path / "train.py").touch()
    request = JobRequest("a", SourceCode(str(tmp_path / "train.py")), upload="putonly://b/closed")
    job = launch.start(request, tmp_path / "jobs")
    (job.tree("algo-1").model / "m").touch()
    JobSupervisor(job)._finish()
    state = job.read_state()
    assert state.status == "Failed"
    assert state.failure_reason == (
        "The results of a job must reach their address. Received: "
        "putonly://b/closed/a/output/model.tar.gz: PermissionError: Access Denied. "
        f"They are kept in {job.model}: copy them from there."
    )
    assert follow.model_data(job) == str(job.model)
