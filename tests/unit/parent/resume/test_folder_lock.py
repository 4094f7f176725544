"""One run at a time uses a folder of checkpoints."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.parent.resume.store import Folder

_HOLDER = """
import sys
from nanotf.parent.resume.store import Folder
Folder(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


def _locked(path: pathlib.Path) -> Folder:
    folder = Folder(path)
    folder.lock()
    return folder


def test_a_second_run_in_this_process(tmp_path: pathlib.Path) -> None:
    lock = _locked(tmp_path)
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    with pytest.raises(InvalidArgumentError, match=rf"this process \(pid {os.getpid()}\)"):
        _locked(link)
    lock.release()
    lock.release()
    _locked(link).release()


def test_another_process_is_named_and_its_death_releases(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(InvalidArgumentError, match=f"which process {holder.pid} on .+ uses"):
            _locked(tmp_path)
        holder.send_signal(signal.SIGKILL)
    _locked(tmp_path).release()


def test_a_forked_child_does_not_have_its_parents_lock(tmp_path: pathlib.Path) -> None:
    lock = _locked(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            _locked(tmp_path)
        except InvalidArgumentError as error:
            os._exit(0 if f"process {os.getppid()} on" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lock.release()


def test_what_else_opens_the_file_does_not_drop_the_lock(tmp_path: pathlib.Path) -> None:
    """A callback that copies the folder opens and closes every file in it."""
    lock = _locked(tmp_path)
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, input="", check=False)
    assert f"which process {os.getpid()} on" in done.stderr
    lock.release()


def test_a_child_that_lives_longer_holds_nothing(tmp_path: pathlib.Path) -> None:
    lock = _locked(tmp_path)
    wait, end = os.pipe()
    if os.fork() == 0:
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    lock.release()
    _locked(tmp_path).release()
    os.close(end)
    os.close(wait)
    os.wait()


def test_a_full_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock holds; it names nobody."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = _locked(tmp_path)
    with pytest.raises(InvalidArgumentError, match="which another process uses"):
        _locked(tmp_path)
    lock.release()
