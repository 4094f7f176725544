"""The folder of a server, and those of servers that were killed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from nanotf.cli import serve_folder
from nanotf.wire import files

HOLDER = """
from nanotf.cli import serve_folder
with serve_folder.private_folder() as folder:
    (folder / "model").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The directory of temporary files, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def _content(place: pathlib.Path) -> set[pathlib.Path]:
    return set(place.iterdir())


def test_a_folder_is_removed_at_the_end(place: pathlib.Path) -> None:
    with serve_folder.private_folder() as folder:
        assert _content(place) == {folder}
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(files.LockHeld, match=f"process {os.getpid()} on "):
            files.Lock(folder / "server.lock")
    assert not _content(place)
    with pytest.raises(KeyError), serve_folder.private_folder():
        raise KeyError
    assert not _content(place)


def test_the_folder_of_a_killed_server_is_removed(place: pathlib.Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        theirs = pathlib.Path(holder.stdout.readline().strip())
        with serve_folder.private_folder() as ours:
            assert _content(place) == {theirs, ours}  # its server runs
        holder.kill()
        holder.wait()
        assert (theirs / "model").is_file()
        with serve_folder.private_folder() as ours:
            assert _content(place) == {ours}


def test_nothing_else_is_removed(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "nanotf-serve-starting").mkdir()  # its server has no lock yet
    (place / "nanotf-serve-starting" / ".server.lock").touch()
    (place / "nanotf-serve-file").touch()
    (place / "other").mkdir()
    (place / "other" / "server.lock").touch()
    (place / "nanotf-serve-link").symlink_to("other")
    (place / "nanotf-serve-odd" / "server.lock").mkdir(parents=True)
    before = set(place.rglob("*"))
    with serve_folder.private_folder():
        pass
    assert set(place.rglob("*")) == before
    left = place / "nanotf-serve-left"
    left.mkdir()
    (left / "server.lock").touch()
    with monkeypatch.context() as patches:
        patches.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        with serve_folder.private_folder():
            assert left.exists()  # it belongs to somebody else
    with serve_folder.private_folder():
        assert not left.exists()
