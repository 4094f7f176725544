"""The models that MODEL of a command line stands for."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest
from tiny_models import (
    archive,
    hdf5_bytes,
    keras_bytes,
    numbers,
    prefixed,
    saved_model,
    saved_model_files,
    settled,
    write,
)

from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository import ALL, LATEST, Repository, Source, sources_of

MODEL = saved_model_files([20])
CODE = {"code/inference.py": b"", "code/lib/helper.py": b""}


def _found(path: pathlib.Path, name: str | None = None) -> list[Source]:
    folder = path.parent / "private"
    folder.mkdir(exist_ok=True)
    found = sources_of(path, name, folder=folder)
    return [dataclasses.replace(source, home=None) for source in found]


def test_a_saved_model(tmp_path: pathlib.Path) -> None:
    folder = saved_model(tmp_path / "half")
    assert _found(folder) == [Source("half", folder, 1)]
    assert _found(folder, "other") == [Source("other", folder, 1)]


def test_a_version_folder_by_itself(tmp_path: pathlib.Path) -> None:
    folder = saved_model(tmp_path / "half" / "0042")
    assert _found(folder) == [Source("half", folder, 42)]


def test_version_folders(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "half" / "1")
    assert _found(tmp_path / "half") == [Source("half", tmp_path / "half", policy=LATEST)]
    assert sources_of(tmp_path / "half", folder=tmp_path, policy=ALL)[0].policy == ALL


def test_version_folders_whose_first_is_still_copied(tmp_path: pathlib.Path) -> None:
    (tmp_path / "half" / "1").mkdir(parents=True)
    assert _found(tmp_path / "half") == [Source("half", tmp_path / "half")]


@pytest.mark.parametrize(("name", "data"), [("m.x.keras", keras_bytes()), ("m.x.h5", hdf5_bytes())])
def test_a_keras_file(tmp_path: pathlib.Path, name: str, data: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert _found(file) == [Source("m.x", file, 1)]
    (version,) = settled(Repository(_found(file))).versions
    assert version.path == file


def test_a_program(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "fast", {"program.json": b"{}"})
    assert _found(folder) == [Source("fast", folder, 1)]


def test_a_relative_path_and_links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(tmp_path / "v7")
    (tmp_path / "current").symlink_to("v7")
    monkeypatch.chdir(tmp_path / "v7")
    assert sources_of(".", folder=tmp_path) == [
        Source("v7", tmp_path / "v7", 1, home=tmp_path / "v7")
    ]
    assert sources_of("../current", folder=tmp_path)[0].path == tmp_path / "current"


def test_the_layout_of_old_training_jobs(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "job/export/Servo/1")
    assert _found(tmp_path / "job") == [Source("Servo", tmp_path / "job/export/Servo")]


def test_a_folder_of_several_models(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        saved_model(tmp_path / "models" / name / "1")
    with pytest.raises(InvalidArgumentError, match=r"several: a, b\. .*--models-dir"):
        _found(tmp_path / "models")
    found = sources_of(tmp_path / "models", folder=tmp_path, unpacked=True)
    assert [(source.model, source.policy) for source in found] == [("a", ALL), ("b", ALL)]
    with pytest.raises(InvalidArgumentError, match=r"--name is for one model"):
        sources_of(tmp_path / "models", "a", folder=tmp_path, unpacked=True)


def test_code_belongs_to_the_model(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "m", {**prefixed("1", MODEL), **CODE})
    assert _found(folder) == [Source("m", folder, code=folder / "code")]
    other = write(tmp_path / "other", {"inference.py": b""})
    (source,) = sources_of(folder, folder=tmp_path, code=other)
    assert source.code == other
    with pytest.raises(InvalidArgumentError, match=r"a folder with inference\.py"):
        sources_of(folder, folder=tmp_path, code=tmp_path)


def test_code_may_have_a_model_of_its_own(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "m", {"weights.bin": b"w", **CODE})
    assert _found(folder) == [Source("m", folder, 1, code=folder / "code")]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "(an empty folder)"),
        ({"a.txt": b"", "b/c.txt": b""}, "(a folder with a.txt, b)"),
        ({f"{n}.txt": b"" for n in range(10)}, "7.txt, and 2 more)"),
        ({"new\nline": b""}, r"(a folder with new\nline)"),
        ({"m.weights.h5": b""}, "(a folder with m.weights.h5)"),
    ],
)
def test_a_folder_without_a_model(
    tmp_path: pathlib.Path, files: dict[str, bytes], said: str
) -> None:
    folder = write(tmp_path / "m", files)
    folder.mkdir(exist_ok=True)
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        _found(folder)


def test_no_such_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"MODEL must exist. Received: .*/nothing\."):
        _found(tmp_path / "nothing")
    (tmp_path / "m.onnx").write_bytes(b"text")
    with pytest.raises(InvalidArgumentError, match=r"not compressed by gzip"):
        _found(tmp_path / "m.onnx")


@pytest.mark.parametrize("name", ["größe 模型", "a b", "50%", "-x", "é.v1"])
def test_odd_names(tmp_path: pathlib.Path, name: str) -> None:
    saved_model(tmp_path / name / "1")
    (source,) = _found(tmp_path / name)
    assert source.model == name
    assert numbers(settled(Repository([source]))) == [1]


@pytest.mark.parametrize("name", ["a:b", "a\nb", "a\udcffb", "\u202ex"])
def test_names_that_urls_cannot_have(tmp_path: pathlib.Path, name: str) -> None:
    saved_model(tmp_path / name / "1")
    with pytest.raises(InvalidArgumentError, match=r"printable text .* Pass --name"):
        _found(tmp_path / name)
    assert _found(tmp_path / name, "good")[0].model == "good"


def _archived(tmp_path: pathlib.Path, files: dict[str, bytes]) -> dict[str, str]:
    """Returns the models of an archive and their paths in it."""
    sources = _found(archive(tmp_path / "model.tar.gz", files))
    (root,) = (tmp_path / "private").iterdir()
    assert {source.policy for source in sources if source.number is None} <= {ALL}
    return {source.model: str(source.path.relative_to(root)) for source in sources}


@pytest.mark.parametrize(
    ("files", "models"),
    [
        (prefixed("half/1", MODEL), {"half": "half"}),
        (prefixed("deep/er/half/00012", MODEL), {"half": "deep/er/half"}),
        (prefixed("1", MODEL), {"model": "."}),
        (MODEL, {"model": "."}),
        (prefixed("./1", MODEL), {"model": "."}),
        (prefixed("export/Servo/1", MODEL), {"Servo": "export/Servo"}),
        (prefixed("export/Servo/1", MODEL) | {"2020/data.csv": b""}, {"Servo": "export/Servo"}),
        (prefixed("a/1", MODEL) | prefixed("b/7", MODEL), {"a": "a", "b": "b"}),
        (prefixed("mine", MODEL), {"mine": "mine"}),
        ({"model.keras": keras_bytes()}, {"model": "model.keras"}),
        ({"a.keras": keras_bytes(), "b.h5": hdf5_bytes()}, {"a": "a.keras", "b": "b.h5"}),
        ({"3/model.keras": keras_bytes()}, {"model": "."}),
        ({"m/3/x.keras": keras_bytes()}, {"m": "m"}),
        ({"fast/program.json": b"{}"}, {"fast": "fast"}),
    ],
)
def test_archives(tmp_path: pathlib.Path, files: dict[str, bytes], models: dict[str, str]) -> None:
    assert _archived(tmp_path, files) == models


def test_an_archive_with_code_and_several_versions(tmp_path: pathlib.Path) -> None:
    files = {**prefixed("half/1", MODEL), **prefixed("half/003", MODEL), **CODE}
    (source,) = _found(archive(tmp_path / "model.tar.gz", files))
    assert source.code is not None and (source.code / "lib/helper.py").is_file()
    wanted = settled(Repository([source]))
    assert numbers(wanted) == [1, 3]
    assert {version.code for version in wanted.versions} == {source.code}


def test_an_archive_without_a_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\(a folder with results\.csv\)"):
        _archived(tmp_path, {"results.csv": b"1"})


def test_an_archive_with_two_models_of_one_name(tmp_path: pathlib.Path) -> None:
    files = {**prefixed("x/half/1", MODEL), **prefixed("y/half/1", MODEL)}
    with pytest.raises(InvalidArgumentError, match=r"'half' at .*/[xy]/half and at"):
        _archived(tmp_path, files)


def test_folders_that_link_to_each_other(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "root/a/half/1")
    (tmp_path / "root/a/up").symlink_to(tmp_path / "root")
    (tmp_path / "root/b").symlink_to(tmp_path / "root/a")
    assert [source.model for source in _found(tmp_path / "root")] == ["half"]
