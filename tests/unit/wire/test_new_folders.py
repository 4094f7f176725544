"""`files.new_folder`: a folder takes its name, and another one's place."""

from __future__ import annotations

import pathlib
import threading

import pytest

from nanotf.wire import files


def _write(path: pathlib.Path, text: str) -> None:
    with files.new_folder(path) as folder:
        (folder / "file").write_text(text)


@pytest.fixture(params=["one step", "two steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two steps":
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("steps")
def test_a_folder_takes_a_place(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    for text in ("1", "2", "3"):
        _write(path, text)
        assert (path / "file").read_text() == text
        assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.usefixtures("steps")
def test_a_failure_leaves_the_old_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    _write(path, "1")

    def fail(*_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patches, pytest.raises(OSError, match="full"):
        patches.setattr(files, "flush_folder", fail)
        _write(path, "2")
    assert (path / "file").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_names_that_are_not_there_are_not_exchanged(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    assert not files._exchange(tmp_path / "a", tmp_path / "b")
    assert not files._exchange(tmp_path / "b", tmp_path / "a")


def test_a_reader_always_finds_a_folder(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    path, missing, is_over = tmp_path / "p", [], threading.Event()
    _write(path, "0")

    def read() -> None:
        while not is_over.is_set():
            if not path.is_dir():
                missing.append(path)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(50):
            _write(path, str(number))
    finally:
        is_over.set()
        reader.join()
    assert not missing
