"""Versions that are wanted, while files come, change and leave."""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import keras_bytes, numbers, saved_model, saved_model_files, settled, tick, write

from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository import (
    ALL,
    LATEST,
    ModelsFolder,
    Repository,
    Source,
    VersionPolicy,
    sources_of,
)


def _repository(path: pathlib.Path, policy: VersionPolicy = ALL) -> Repository:
    return Repository([Source("m", path, policy=policy)])


def test_a_version_is_wanted_from_the_second_look_on(tmp_path: pathlib.Path) -> None:
    folder = saved_model(tmp_path / "3")
    repository = _repository(tmp_path)
    assert numbers(repository.look()) == []
    (version,) = repository.look().versions
    assert (version.model, version.number, version.path) == ("m", 3, folder)
    assert version.code is None
    assert repository.look().versions == {version}


def test_a_version_that_is_copied_slowly_is_not_wanted_before_it_is_whole(
    tmp_path: pathlib.Path,
) -> None:
    saved_model(tmp_path / "1")
    repository = _repository(tmp_path, LATEST)
    assert numbers(settled(repository)) == [1]
    for name, data in saved_model_files([60, 40], ["words.txt"]).items():
        for end in (0, len(data) // 2, len(data)):
            assert numbers(repository.look()) == [1]
            write(tmp_path / "2", {name: data[:end]})
            for _ in range(3):  # the copy pauses
                before = numbers(repository.look())
                whole = name == "saved_model.pb" and end == len(data)
                assert before == [1] or whole
    assert numbers(repository.look()) == [2]


def test_versions_renamed_into_place(tmp_path: pathlib.Path) -> None:
    base = tmp_path / "base"
    saved_model(base / "1")
    repository = _repository(base)
    assert numbers(settled(repository)) == [1]
    saved_model(tmp_path / "2.part").rename(base / "2")
    assert numbers(settled(repository)) == [1, 2]


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (LATEST, [30]),
        (VersionPolicy(limit=2), [20, 30]),
        (VersionPolicy(limit=9), [1, 20, 30]),
        (ALL, [1, 20, 30]),
        (VersionPolicy(only=frozenset([1, 30, 77])), [1, 30]),
        (VersionPolicy(only=frozenset([77])), []),
    ],
)
def test_policies(tmp_path: pathlib.Path, policy: VersionPolicy, wanted: list[int]) -> None:
    for number in (1, 20, 30):
        saved_model(tmp_path / str(number))
    assert numbers(settled(_repository(tmp_path, policy))) == wanted


def test_names_that_are_no_version(tmp_path: pathlib.Path) -> None:
    for name in [
        "0.1",
        "-4",
        "+5",
        "v6",
        "7a",
        "٨",
        "9" * 30,
        "1" * 200,
        "0x1",
        " 2",
        "2\n",
        "1e3",
    ]:
        saved_model(tmp_path / name)
    (tmp_path / "8").write_bytes(b"a file")
    (tmp_path / "current").symlink_to("007")
    saved_model(tmp_path / "007")
    saved_model(tmp_path / str(2**63 - 1))
    assert numbers(settled(_repository(tmp_path))) == [7, 2**63 - 1]


def test_two_folders_of_one_number(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "003")
    saved_model(tmp_path / "3")
    (version,) = settled(_repository(tmp_path)).versions
    assert version.path == tmp_path / "3"


def test_a_version_that_is_a_link(tmp_path: pathlib.Path) -> None:
    base, store = tmp_path / "base", tmp_path / "store"
    saved_model(store / "a")
    saved_model(store / "b")
    base.mkdir()
    (base / "1").symlink_to(store / "a")
    repository = _repository(base)
    (old,) = settled(repository).versions
    assert (old.number, old.path) == (1, store / "a")
    (base / "new").symlink_to(store / "b")
    (base / "new").replace(base / "1")  # as git-sync and Kubernetes do
    assert repository.look().versions == {old}
    (new,) = repository.look().versions
    assert (new.number, new.path) == (1, store / "b")


def test_links_that_lead_nowhere(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "1")
    target = saved_model(tmp_path / "target")
    (tmp_path / "2").symlink_to(target)
    (tmp_path / "3").symlink_to("3")
    (tmp_path / "4").symlink_to("nothing")
    repository = _repository(tmp_path)
    assert numbers(settled(repository)) == [1, 2]
    shutil.rmtree(target)
    assert numbers(repository.look()) == [1]


def test_a_base_that_is_a_link(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "v1" / "1")
    saved_model(tmp_path / "v2" / "2")
    base = tmp_path / "current"
    base.symlink_to("v1")
    repository = _repository(base)
    assert numbers(settled(repository)) == [1]
    base.unlink()
    assert numbers(repository.look()) == [1]
    base.symlink_to("v2")
    assert numbers(settled(repository)) == [2]


def test_a_keras_file_in_a_version_keeps_its_name(tmp_path: pathlib.Path) -> None:
    """Keras tells formats by the ending, which the file that a link leads to may lack."""
    write(tmp_path / "store", {"0123abc": keras_bytes()})
    (tmp_path / "base/1").mkdir(parents=True)
    (tmp_path / "base/1/model.keras").symlink_to(tmp_path / "store/0123abc")
    (version,) = settled(_repository(tmp_path / "base")).versions
    assert version.path == tmp_path / "base/1/model.keras"


def test_a_version_that_disappears(tmp_path: pathlib.Path) -> None:
    for number in (1, 2):
        saved_model(tmp_path / str(number))
    repository = _repository(tmp_path)
    assert numbers(settled(repository)) == [1, 2]
    shutil.rmtree(tmp_path / "2")
    assert numbers(repository.look()) == [1]
    shutil.rmtree(tmp_path / "1")  # the last one
    assert numbers(repository.look()) == [1]
    tmp_path.rmdir()
    assert numbers(repository.look()) == [1]
    saved_model(tmp_path / "3")
    assert numbers(settled(repository)) == [3]


def test_the_latest_disappears(tmp_path: pathlib.Path) -> None:
    for number in (1, 2):
        saved_model(tmp_path / str(number))
    repository = _repository(tmp_path, LATEST)
    assert numbers(settled(repository)) == [2]
    shutil.rmtree(tmp_path / "2")
    assert numbers(repository.look()) == [2]  # until the other one has been seen twice
    assert numbers(repository.look()) == [1]


def test_what_remains_of_a_removed_version(tmp_path: pathlib.Path) -> None:
    """NFS keeps files that a worker has open under other names, and with them the folder."""
    for number in (1, 2):
        saved_model(tmp_path / str(number))
    repository = _repository(tmp_path)
    assert numbers(settled(repository)) == [1, 2]
    (tmp_path / "2/saved_model.pb").rename(tmp_path / "2/.nfs0001")
    assert numbers(repository.look()) == [1, 2]  # may be on its way back
    assert numbers(repository.look()) == [1]


def test_a_version_that_is_written_again(tmp_path: pathlib.Path) -> None:
    folder = saved_model(tmp_path / "1")
    repository = _repository(tmp_path)
    (old,) = settled(repository).versions
    data = folder / "variables/variables.data-00000-of-00001"
    data.write_bytes(b"x" * 50)
    for _ in range(3):
        assert repository.look().versions == {old}
    data.write_bytes(b"x" * 100)
    assert repository.look().versions == {old}
    (new,) = repository.look().versions
    assert new.number == 1 and new != old


def test_a_version_deleted_and_made_again_with_the_same_sizes_and_times(
    tmp_path: pathlib.Path,
) -> None:
    folder = saved_model(tmp_path / "1")
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    repository = _repository(tmp_path)
    (old,) = settled(repository).versions
    tick(tmp_path)
    shutil.rmtree(folder)
    saved_model(folder)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    assert repository.look().versions == {old}
    (new,) = repository.look().versions
    assert new != old


def test_changed_code_makes_another_version(tmp_path: pathlib.Path) -> None:
    folder = saved_model(tmp_path / "model")
    code = write(tmp_path / "code", {"inference.py": b"x = 1"})
    repository = Repository([Source("m", folder, 1, code=code)])
    (old,) = settled(repository).versions
    assert old.code == code
    tick(tmp_path)
    write(code, {"inference.py": b"x = 2"})
    (new,) = settled(repository).versions
    assert new != old


@pytest.mark.parametrize("layout", ["m", "m/1", "m/job/export/1"])
def test_code_that_comes_later_makes_another_version(tmp_path: pathlib.Path, layout: str) -> None:
    saved_model(tmp_path / layout)
    home = tmp_path / "m"
    repository = Repository(sources_of(home, folder=tmp_path))
    (old,) = settled(repository).versions
    assert old.code is None
    (home / "code").mkdir()
    assert {version.code for version in settled(repository).versions} == {None}
    write(home / "code", {"inference.py": b"x = 1"})
    assert repository.look().versions == {old}  # it may still be written
    (new,) = settled(repository).versions
    assert new.code == home / "code" and new.number == old.number and new != old
    shutil.rmtree(home / "code")  # or is not mounted now
    assert {version.code for version in settled(repository).versions} == {home / "code"}


def test_code_in_a_folder_of_models_that_comes_later(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "a" / "1")
    repository = Repository([], [ModelsFolder(tmp_path)])
    (old,) = settled(repository).versions
    write(tmp_path / "a/code", {"inference.py": b"x = 1"})
    (new,) = settled(repository).versions
    assert (old.code, new.code) == (None, tmp_path / "a/code")
    shutil.rmtree(tmp_path / "a/code")
    assert settled(repository).versions == {new}


def test_a_folder_without_a_model_is_served_by_its_code(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {"code/inference.py": b"", "weights.bin": b"w"})
    (version,) = settled(Repository([Source("m", tmp_path, 1, code=tmp_path / "code")])).versions
    assert version.path == tmp_path


@pytest.mark.parametrize("name", ["stat", "scandir"])
def test_a_file_system_that_does_not_answer(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    for number in (1, 2):
        saved_model(tmp_path / str(number))
    repository = _repository(tmp_path)
    wanted = settled(repository)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "nanotf"):
        patch.setattr(pathlib.Path if name == "stat" else os, name, fail)
        for _ in range(4):
            found = repository.look()
            assert (found.versions, found.labels) == (wanted.versions, wanted.labels)
            assert "Input/output error" in found.problems["m"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines and len(lines) == len(set(lines))
    assert all("Input/output error" in line for line in lines)
    assert repository.look() == wanted


@pytest.mark.parametrize("failing", range(1, 30))
def test_every_call_to_the_file_system_may_fail(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A version that is served stays until the next one is, whichever call fails."""
    saved_model(tmp_path / "1")
    repository = _repository(tmp_path, LATEST)
    assert numbers(settled(repository)) == [1]
    saved_model(tmp_path / "2")
    calls = 0

    def counted(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        for place, name in [(os, "scandir"), (os, "stat"), (os, "pread"), (io, "open")]:
            patch.setattr(place, name, functools.partial(counted, getattr(place, name)))
        assert numbers(repository.look()) == [1]
        found = [numbers(repository.look()) for _ in range(3)]
    assert found in ([[2]] * 3, [[1], [2], [2]], [[1], [1], [2]])


def test_what_is_not_served_is_said_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved_model(tmp_path / "5")
    (folder / "variables/variables.index").unlink()
    repository = _repository(tmp_path)
    with caplog.at_level(logging.WARNING, "nanotf"):
        for _ in range(5):
            repository.look()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{folder}: It is not served yet: variables/variables.index is missing."


def test_a_folder_of_models(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "a" / "1")
    saved_model(tmp_path / "b")
    write(tmp_path / "c", {"model.keras": keras_bytes(), "code/inference.py": b""})
    write(tmp_path / ".hidden/1", {"saved_model.pb": b""})
    write(tmp_path / "notes", {"text.txt": b""})
    saved_model(tmp_path / "d:e" / "1")
    repository = Repository([], [ModelsFolder(tmp_path, ALL)])
    assert repository.default_model == "a"
    found = {v.model: v for v in settled(repository).versions}
    assert {name: v.number for name, v in found.items()} == {"a": 1, "b": 1, "c": 1}
    assert found["c"].path == tmp_path / "c/model.keras"
    assert found["c"].code == tmp_path / "c/code"
    saved_model(tmp_path / "f" / "9")
    shutil.rmtree(tmp_path / "a")
    assert {v.model for v in settled(repository).versions} == {"b", "c", "f"}
    assert repository.default_model == "b"
    shutil.rmtree(tmp_path)  # not mounted
    assert {v.model for v in settled(repository).versions} == {"b", "c", "f"}
    tmp_path.mkdir()
    assert {v.model for v in settled(repository).versions} == {"b", "c", "f"}


def test_models_of_one_name(tmp_path: pathlib.Path) -> None:
    sources = [Source("m", tmp_path / "a"), Source("m", tmp_path / "b")]
    with pytest.raises(InvalidArgumentError, match=r"'m' at .*/a and at .*/b"):
        Repository(sources)


def test_the_default_model(tmp_path: pathlib.Path) -> None:
    sources = [Source("b", tmp_path), Source("a", tmp_path)]
    assert Repository(sources).default_model == "b"
    assert Repository(sources, default_model="a").default_model == "a"
    assert Repository([]).default_model is None
    with pytest.raises(InvalidArgumentError, match=r"one of b, a. Received: 'x'"):
        Repository(sources, default_model="x")


def test_the_front_imports_no_tensorflow(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "m" / "1")
    write(tmp_path, {"models.config": b"model_config_list { config { name: 'm' base_path: '/' } }"})
    code = f"""
import pathlib, sys, tempfile
from nanotf.serving.repository import ConfigFile, Repository, sources_of
folder = pathlib.Path({str(tmp_path)!r})
sources = sources_of(folder / "m", "x", folder=folder)
repository = Repository(sources, [ConfigFile(folder / "models.config")])
repository.look()
assert repository.look().versions
print({{name.split(".")[0] for name in sys.modules}} & {{"tensorflow", "keras", "numpy"}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr
