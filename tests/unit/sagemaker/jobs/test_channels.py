"""Data channels: the command line, the checks, the links in a host's tree, feeders."""

from __future__ import annotations

import pathlib

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import addresses, data_channels
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.tree import Tree


def _tree(base: pathlib.Path) -> Tree:
    tree = Tree(base)
    tree.make()
    return tree


def test_options() -> None:
    text = "train=./a,b=c/d,mode=Pipe,shuffle=7,compression=Gzip,record-wrapping=RecordIO"
    assert data_channels.parse_options(["test=s3://b/t", text]) == [
        DataChannel("test", "s3://b/t"),
        DataChannel("train", "./a,b=c/d", "Pipe", None, compression="Gzip", wrapping="RecordIO",
                shuffle=7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["train"], "name=source. Received: --channel train"),
        (["=data"], "name=source. Received: --channel =data"),
        (["train="], "name=source. Received: --channel train="),
        (["a=b,mode=Pipe,shuffle=x"], "whole number, the seed. Received: --channel a=b"),
        (["a=b", "a=c"], "name of its own. Received: a twice"),
    ],
)
def test_wrong_options(options: list[str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        data_channels.parse_options(options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "a/b"}, "1 to 64 letters.*Received: 'a/b'"),
        ({"mode": "pipe"}, "`mode` must be one of 'File', 'FastFile', 'Pipe'"),
        ({"distribution": "x"}, "`distribution` must be one of"),
        ({"compression": "Zip"}, "`compression` must be one of 'None', 'Gzip'"),
        ({"compression": "Gzip"}, "`compression` needs mode=Pipe.*channel train, mode=File"),
        ({"wrapping": "RecordIO"}, "`record-wrapping` needs mode=Pipe"),
        ({"shuffle": 1}, "`shuffle` needs mode=Pipe"),
        ({"source": "/no/such/place"}, "data must exist. Received: /no/such/place"),
        ({"source": "file://host/x"}, "absolute path"),
    ],
)
def test_bad_channels(changes: dict[str, object], text: str, tmp_path: pathlib.Path) -> None:
    values: dict[str, object] = {"name": "train", "source": str(tmp_path), **changes}
    with pytest.raises(InvalidArgumentError, match=text):
        DataChannel(**values).check()  # type: ignore[arg-type]


def test_configuration() -> None:
    assert DataChannel("a", ".", content_type="text/csv").configuration() == {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
        "ContentType": "text/csv",
    }


def test_a_folder_is_linked(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.txt").write_text("x")
    tree = _tree(tmp_path / "ml")
    channel = DataChannel("train", f"file://{tmp_path}/data")
    assert data_channels.provide(channel, tree, tmp_path / "downloads") == tmp_path / "data"
    assert (tree.data / "train/x.txt").read_text() == "x"
    assert (tree.data / "train").is_symlink()


def test_a_file_is_in_a_folder_of_its_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_text("1,2")
    tree = _tree(tmp_path / "ml")
    data_channels.provide(
        DataChannel("train", str(tmp_path / "x.csv")), tree, tmp_path / "downloads"
    )
    assert [path.name for path in (tree.data / "train").iterdir()] == ["x.csv"]


def test_pipes_get_a_feeder_instead_of_a_link(tmp_path: pathlib.Path) -> None:
    tree = _tree(tmp_path / "ml")
    channel = DataChannel("a", str(tmp_path), "Pipe", shuffle=7, compression="Gzip")
    source = data_channels.provide(channel, tree, tmp_path / "downloads")
    assert list(tree.data.iterdir()) == []
    assert data_channels.feeder_arguments(channel, source, tree) == [
        *("nanotf.data.feed", "--source", str(tmp_path), "--pipe-dir", str(tree.data)),
        *("--channel", "a", "--shuffle", "7", "--compression", "Gzip"),
    ]


def test_remote_data_are_copied_once(tmp_path: pathlib.Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe({"/jobs/data/a.txt": b"a", "/jobs/data/sub/b.txt": b"b"})
    channel = DataChannel("train", "memory://jobs/data")
    channel.check()
    for host in ("algo-1", "algo-2"):
        tree = _tree(tmp_path / host)
        data_channels.provide(channel, tree, tmp_path / "downloads")
        assert (tree.data / "train/a.txt").read_text() == "a"
        assert (tree.data / "train/sub/b.txt").read_text() == "b"
        if memory.exists("/jobs"):
            memory.rm("/jobs", recursive=True)
    addresses.upload(tmp_path / "downloads/train/a.txt", "memory://results/x/a.txt")
    assert memory.cat("/results/x/a.txt") == b"a"
    memory.rm("/results", recursive=True)


def test_storage_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InvalidArgumentError, match=r"s3://b/t .*Install nanotf\[remote\]"):
        DataChannel("a", "s3://b/t").check()


def test_unknown_storage() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(InvalidArgumentError, match="No storage of this kind is known"):
        DataChannel("a", "nowhere://b").check()
