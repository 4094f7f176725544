"""A checkpoint is complete or absent, comes back equal, and holds no pickle."""

from __future__ import annotations

import errno
import json
import logging
import pathlib
import random
import shutil
from typing import Any

import numpy as np
import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.parent.resume.encoding import Arrays, Unencodable, decode, encode, mark_of
from nanotf.parent.resume.store import OWN, Folder


def _written(path: pathlib.Path, count: int) -> Folder:
    folder = Folder(path)
    for number in range(count):
        folder.write({"number": number}, {"a/0": np.full(100, number)})
    return folder


def _names(path: pathlib.Path, beginning: str = "") -> list[str]:
    found = sorted(each.name for each in (path / OWN).iterdir())
    return [name for name in found if name.startswith(beginning)]


def _numbers(folder: Folder) -> list[Any]:
    return [
        (stored.manifest["number"], stored.arrays["a/0"][0]) for stored in folder.newest_first()
    ]


@pytest.mark.parametrize("path", ["", b""])
def test_an_empty_path_is_not_the_current_folder(path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Received: resume='', which would be"):
        Folder(path)


def test_the_newest_two_are_kept(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path / "new" / "folder", 12)
    assert _numbers(folder) == [(11, 11), (10, 10)]
    assert _names(tmp_path / "new" / "folder") == ["checkpoint-00000011", "checkpoint-00000012"]


@pytest.mark.parametrize("name", ["manifest.json", "arrays.npz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "empty"])
def test_a_damaged_file(
    name: str, damage: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _written(tmp_path, 2)
    file = tmp_path / OWN / "checkpoint-00000002" / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = (
            content.replace(b"1", b"2") if damage == "changed" else content[: len(content) // 2]
        )
        file.write_bytes(b"" if damage == "empty" else changed)
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        assert _numbers(folder) == [(0, 0)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "checkpoint-00000002 cannot be used" in line
    folder.write({"number": 7}, {"a/0": np.full(1, 7)})
    assert _numbers(folder)[0] == (7, 7)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O"), OSError(errno.EMFILE, ""), MemoryError()]
)
def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(
    error: Exception, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training from the beginning would delete it, after two checkpoints."""

    def load(*args: Any, **options: Any) -> Any:
        raise error

    folder = _written(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(np, "load", load)
        with pytest.raises(type(error)):
            _numbers(folder)
    assert _numbers(folder) == [(1, 1), (0, 0)]


def test_a_deletion_that_is_cut_short_is_finished(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stock = _written(tmp_path, 2), pathlib.Path.unlink

    def unlink(path: pathlib.Path, **options: Any) -> None:
        stock(path, **options)
        if path.parent.name == "checkpoint-00000001":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            folder.write({"number": 2}, {"a/0": np.full(1, 2)})
    assert len(_names(tmp_path)) == 3
    folder.write({"number": 3}, {"a/0": np.full(1, 3)})
    assert _names(tmp_path) == ["checkpoint-00000003", "checkpoint-00000004"]


def test_a_write_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path, 1)
    with pytest.raises(ValueError, match="Object arrays"):
        folder.write({}, {"b": np.array([object()])})
    assert _names(tmp_path) == ["checkpoint-00000001"]


@pytest.mark.parametrize(
    "name", ["1", "2", "3", "9", "20240131", "99999999", "²", "٣", "checkpoint-9", "x"]
)
def test_nothing_else_is_touched(name: str, tmp_path: pathlib.Path) -> None:
    """Folders and files of the user's, beside nanotf's folder and inside it."""
    places = [tmp_path / name, tmp_path / OWN / name, tmp_path / OWN / f".checkpoint-{name}.part"]
    for place in places:
        place.mkdir(parents=True)
        (place / "saved_model.pb").write_text("mine")
    folder = _written(tmp_path, 4)
    assert _numbers(folder) == [(3, 3), (2, 2)]
    assert _names(tmp_path, "checkpoint-0") == ["checkpoint-00000003", "checkpoint-00000004"]
    assert all((place / "saved_model.pb").read_text() == "mine" for place in places)


def test_what_somebody_has_put_into_a_checkpoint_stays(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path, 1)
    first = tmp_path / OWN / "checkpoint-00000001"
    (first / "plots").mkdir()
    (first / "plots" / "loss.png").write_text("mine")
    (first / "notes.txt").write_text("mine")
    for number in range(1, 4):
        folder.write({"number": number}, {"a/0": np.full(1, number)})
    assert sorted(each.name for each in first.rglob("*")) == ["loss.png", "notes.txt", "plots"]
    assert _numbers(folder) == [(3, 3), (2, 2)]


def test_a_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    """Somebody keeps a checkpoint elsewhere, and left a link in its place."""
    _written(tmp_path / "elsewhere", 1)
    (tmp_path / "here" / OWN).mkdir(parents=True)
    kept = tmp_path / "elsewhere" / OWN / "checkpoint-00000001"
    (tmp_path / "here" / OWN / "checkpoint-00000001").symlink_to(kept)
    _written(tmp_path / "here", 4)
    assert (kept / "manifest.json").is_file()


def test_folders_of_earlier_versions(tmp_path: pathlib.Path) -> None:
    """They are read, new ones follow them in number, and they stay."""
    for number in (1, 2):
        _written(tmp_path / "made", number)
        made = tmp_path / "made" / OWN / f"checkpoint-{number:08}"
        (made / "marker").unlink()
        made.rename(tmp_path / f"{number + 10:08}")
    folder = Folder(tmp_path)
    assert _numbers(folder) == [(1, 1), (0, 0)]
    folder.write({"number": 7}, {"a/0": np.full(1, 7)})
    assert _names(tmp_path) == ["checkpoint-00000013"]
    assert _numbers(folder) == [(7, 7), (1, 1), (0, 0)]


def test_a_killed_writer_leaves_nothing_for_long(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path, 1)
    shutil.copytree(
        tmp_path / OWN / "checkpoint-00000001", tmp_path / OWN / ".checkpoint-00000002.7.a1b2.part"
    )
    folder.write({"number": 1}, {"a/0": np.full(1, 1)})
    assert _names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_another_format(tmp_path: pathlib.Path) -> None:
    folder = _written(tmp_path, 1)
    folder.write({"format": 99}, {})
    with pytest.raises(InvalidArgumentError, match=r"format 2\. Received: .*format 99"):
        list(folder.newest_first())


def test_values_come_back_equal() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {
        "states": (random.getstate(), np.random.get_state()),
        "numbers": [1, 2.5, float("inf"), True, None, "text", np.float32(0.1), 2**80],
        "arrays": {"b": np.arange(3), 4: np.ones((2, 0)), "c": np.array(1.5)},
        "half": np.ones(2, ml_dtypes.bfloat16),
    }
    arrays: Arrays = {}
    text = json.dumps(encode(values, arrays, "v"))
    found = decode(json.loads(text), arrays)
    assert mark_of(found) == mark_of(values)
    assert found["states"][0] == values["states"][0]
    assert type(found["numbers"][6]) is np.float32
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert list(found["arrays"]) == ["b", 4, "c"]


def test_other_objects_are_refused() -> None:
    with pytest.raises(Unencodable, match="v/1 is an object of class object"):
        encode([1, object()], {}, "v")
    assert mark_of(object()) is None
    assert mark_of(np.zeros(3)) != mark_of(np.ones(3))
