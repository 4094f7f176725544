"""`nanotf.inference.program_folder`: what lies on the disk, and what is never overwritten."""

from __future__ import annotations

import json
import pathlib

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.inference import program_folder
from nanotf.inference.program_folder import Description
from nanotf.inference.signature import DEFAULT, Signature, TensorSpec
from nanotf.wire import files

SIGNATURE = Signature(
    (TensorSpec("ids", "int64", (None, 3)), TensorSpec("text", "string", None)),
    (TensorSpec("p", "float32", (None, 2)),),
)
DESCRIPTION = Description(
    *("tensorflow", "f32", {DEFAULT: SIGNATURE}, {"list": ["ids", "text"]}, "p", {DEFAULT: "why"})
)


def _write(path: pathlib.Path, content: str = "1") -> None:
    with program_folder.written(path) as folder:
        (folder / "engine").mkdir()
        (folder / "engine" / "file").write_text(content)
        program_folder.write_description(folder, DESCRIPTION)


def test_round_trip(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "program"
    _write(path)
    assert program_folder.is_program(path)
    assert program_folder.read_description(path) == DESCRIPTION
    written = json.loads((path / "program.json").read_text())
    assert written["format"] == 1
    assert {"nanotf", "tensorflow"} <= set(written)


def test_a_program_takes_the_place_of_another(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program"
    _write(path)
    before = program_folder.state_of(path)
    _write(path, "2")
    assert (path / "engine" / "file").read_text() == "2"
    assert program_folder.state_of(path) != before
    assert [each.name for each in tmp_path.iterdir()] == ["program"]


def test_a_failure_leaves_what_was_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program"
    _write(path)
    with pytest.raises(OSError, match="full"), program_folder.written(path) as folder:
        (folder / "part").touch()
        raise OSError("full")
    assert (path / "engine" / "file").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["program"]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "other", "damaged"])
def test_what_is_not_a_program_stays(tmp_path: pathlib.Path, kind: str) -> None:
    path, text = tmp_path / "taken", "mine"
    if kind == "file":
        path.write_text(text)
    elif kind == "link":
        _write(tmp_path / "program")
        path.symlink_to(tmp_path / "program")
    else:
        path.mkdir()
        name = "notes.txt" if kind == "folder" else "program.json"
        (path / name).write_text('{"format": "x"}' if kind == "other" else text)
    with pytest.raises(InvalidArgumentError, match="which nanotf has not written"):
        _write(path)
    assert path.is_symlink() == (kind == "link")
    assert path.is_file() == (kind == "file")


def test_the_users_files_in_a_programs_folder_stay(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program"
    _write(path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(
        InvalidArgumentError, match=r"folder with notes\.txt, which nanotf has not written"
    ):
        _write(path, "2")
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "engine" / "file").read_text() == "1"


def test_an_empty_folder_is_taken(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program").mkdir()
    _write(tmp_path / "program")
    assert program_folder.is_program(tmp_path / "program")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "signatures": {"a": {}}}']
)
def test_damage(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "program.json").write_text(content)
    with pytest.raises(files.Damaged, match=r"program\.json is not as nanotf writes it"):
        program_folder.read_description(tmp_path)


def test_a_later_format(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.json").write_text('{"format": 2, "nanotf": "9.1"}')
    with pytest.raises(InvalidArgumentError, match=r"format 2, of nanotf 9\.1"):
        program_folder.read_description(tmp_path)
