"""Mounts that one process and its children see: as the superuser, and as an ordinary user."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from nanotf.machine import private_mounts

# Imports come first: an ordinary user may have no access to this checkout.
ENTER = """
import ctypes, json, os, pathlib, subprocess, sys
from nanotf.machine import private_mounts
places, user, above = json.loads(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
if user != os.getuid():
    os.setgroups([]); os.setgid(user); os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after exec
reason = private_mounts.try_out(places)
if reason is not None:
    print(json.dumps({"reason": reason}))
    sys.exit()
private_mounts.enter(places)
(above / "ml/written").write_text("x")
for one, other in ((above / "ml", above.parent / "job"), (above.parent / "job", above / "ml")):
    (one / "written").rename(other / "renamed")
    (other / "renamed").rename(one / "written")
(above / "tool/written").write_text("x")
try:
    (above / "new").write_text("x")
    refused = ""
except OSError as error:
    refused = error.strerror
seen = {path.name: path.read_text() for path in above.iterdir() if path.is_file()}
child = subprocess.run(["/bin/sh", "-c", f"id -u; cat {above}/ml/inside"], capture_output=True)
print(json.dumps({"uid": os.getuid(), "seen": seen, "refused": refused,
    "names": sorted(os.listdir(above)), "child": child.stdout.decode().split(),
    "cores": sorted(os.sched_getaffinity(0))}))
"""


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder that any user can reach; the tests' own temporary folder is closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        pathlib.Path(path).chmod(0o777)
        yield pathlib.Path(path)


def _enter(folder: pathlib.Path, user: int) -> dict[str, Any]:
    """Returns what a process sees that has laid `job` over `opt/ml`."""
    (folder / "job").mkdir()
    (folder / "job/inside").write_text("inside")
    (folder / "opt/tool").mkdir(parents=True)
    for path in (folder / "job", folder / "opt/tool"):
        path.chmod(0o777)
    (folder / "opt/file").write_text("file")
    (folder / "opt/link").symlink_to("file")
    places = {str(folder / "opt/ml"): str(folder / "job")}
    done = subprocess.run(
        [sys.executable, "-c", ENTER, json.dumps(places), str(user), str(folder / "opt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "reason" in found:
        pytest.skip(f"this machine allows no private mounts: {found['reason']}")
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("user", [None, 65534])
def test_a_folder_at_another_path(folder: pathlib.Path, user: int | None, exists: bool) -> None:
    if user is not None and os.getuid() != 0:
        pytest.skip("needs the superuser, who can become another")
    if exists:
        (folder / "opt/ml").mkdir(parents=True)
        (folder / "opt").chmod(0o777)
    found = _enter(folder, os.getuid() if user is None else user)
    assert found["uid"] == (os.getuid() if user is None else user)
    assert found["child"] == [str(found["uid"]), "inside"]
    assert found["cores"] == sorted(os.sched_getaffinity(0))
    assert (folder / "job/written").read_text() == "x"
    assert (folder / "opt/tool/written").read_text() == "x"  # the very same folder
    assert found["names"] == ["file", "link", "ml", "tool"]
    assert found["seen"] == {"file": "file", "link": "file"}
    # A file that would vanish with the mount.
    assert found["refused"] == "Read-only file system"
    # Outside, nothing has changed.
    left = {"file", "link", "tool", *(("ml",) if exists else ())}
    assert {path.name for path in (folder / "opt").iterdir()} == left
    if exists:
        assert list((folder / "opt/ml").iterdir()) == []


def test_the_reason_why_it_is_not_possible(tmp_path: pathlib.Path) -> None:
    reason = private_mounts.try_out({str(tmp_path / "no/such"): str(tmp_path)})
    assert reason is not None
    assert list(tmp_path.iterdir()) == []
