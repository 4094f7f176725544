"""`files.new_file`: a file is replaced in one step, or stays as it was."""

from __future__ import annotations

import os
import pathlib

import pytest

from nanotf.wire import files


def test_a_failure_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    files.write_text(path, "1")

    def write() -> None:
        with files.new_file(path) as file:
            file.write(b"2")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_two_writers_at_a_time(tmp_path: pathlib.Path) -> None:
    """They may be in two containers, in which both are process 1."""
    path = tmp_path / "a"
    with files.new_file(path) as one, files.new_file(path) as other:
        one.write(b"1")
        other.write(b"2")
    assert path.read_text() == "1"  # the last that has ended


def test_the_disk_has_the_content_before_the_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed, fsync = tmp_path / "a", [], os.fsync

    def note(descriptor: int) -> None:
        flushed.append((os.pread(descriptor, 10, 0), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", note)
    files.write_text(path, "\u00e9")
    assert flushed == [("\u00e9".encode(), False)]


@pytest.mark.parametrize("name", ["a" * 255, "\u00e9" * 127])
def test_names_as_long_as_file_systems_take(name: str, tmp_path: pathlib.Path) -> None:
    files.write_text(tmp_path / name, "1")
    with files.new_folder(tmp_path / name[1:]):
        pass
    assert {each.name for each in tmp_path.iterdir()} == {name, name[1:]}


def test_who_may_read_it(tmp_path: pathlib.Path) -> None:
    files.write_text(tmp_path / "a", "", files.PRIVATE)
    assert (tmp_path / "a").stat().st_mode & 0o777 == files.PRIVATE
