"""Imports of child interpreters: the same as this process's, nothing from their current folder."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

import nanotf
from nanotf.errors import NanoError
from nanotf.machine.interpreter import python_command

ROOT = pathlib.Path(__file__).resolve().parents[3]

# A parent: `show`, which only its path has, prints the child's view; then the parent prints its own
# view.
PARENT = """
import sys
sys.path[:] = filter(None, sys.path)  # `-c` puts the current folder there
import json, os, pathlib, shutil, subprocess
sys.path.insert(0, os.environ["PACKAGES"])
import nanotf
del sys.path[0]
sys.path += [os.environ["PROJECT"], os.environ["PACKAGES"], "not there: \\udc80 'a' {0}", ""]
from nanotf.machine.interpreter import python_command
done = subprocess.run(python_command("show", "-c", "a b"), capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout)
assert nanotf.__file__.startswith(os.environ["PACKAGES"])
here = [sys.path, nanotf.__file__, list(sys.flags), os.environ.get("PYTHONPATH")]
print(json.dumps([*here, ["-c", "a b"], "__main__"]))
"""

SHOW = """
import heapq, json, os, pathlib, queue, runpy, sys
import nanotf, nanotf.errors
here = [sys.path, nanotf.__file__, list(sys.flags), os.environ.get("PYTHONPATH")]
print(json.dumps([*here, sys.argv[1:], __name__]))
"""


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of another user, and a folder of packages with nanotf and an unrelated module."""
    for name in ("shared", "packages", "project"):
        (tmp_path / name).mkdir()
    for name in ("heapq", "queue", "runpy", "pathlib", "importlib", "json", "nanotf"):
        (tmp_path / "shared" / f"{name}.py").write_text(f"raise SystemExit('{name} of others')")
    (tmp_path / "packages" / "nanotf").symlink_to(pathlib.Path(nanotf.__file__).parent)
    (tmp_path / "packages" / "pathlib.py").write_text("raise SystemExit('the old pathlib')")
    (tmp_path / "project" / "show.py").write_text(SHOW)
    return tmp_path / "shared"


@pytest.mark.parametrize(
    "options", [(), ("-I", "-O"), ("-s", "-E", "-Xutf8"), ("-P",)], ids=" ".join
)
def test_a_child_imports_the_same_modules_as_its_parent(
    shared: pathlib.Path, options: tuple[str, ...]
) -> None:
    if "-P" in options and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    project, packages = shared.parent / "project", shared.parent / "packages"
    environ = {**os.environ, "PROJECT": str(project), "PACKAGES": str(packages)}
    environ["PYTHONPATH"] = str(project)
    done = subprocess.run(
        [sys.executable, *options, "-c", PARENT],
        cwd=shared,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    child, _, parent = done.stdout.splitlines()
    assert json.loads(child) == json.loads(parent)


@pytest.mark.parametrize("value", ["", None, "/nowhere/python", "/"])
def test_a_missing_interpreter_fails_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", value)
    with pytest.raises(
        NanoError, match=rf"Received: sys.executable={value!r}, which is no program"
    ):
        python_command("nanotf.worker")


def _commands(tree: ast.AST) -> list[ast.List]:
    """Returns lists that begin with this interpreter."""
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List) and node.elts]
    return [node for node in lists if ast.unparse(node.elts[0]) == "sys.executable"]


def test_only_one_place_starts_an_interpreter() -> None:
    """Only one place makes commands from `sys.executable`, and the scripts name no module."""
    found = [
        path.name
        for path in pathlib.Path(nanotf.__file__).parent.rglob("*.py")
        if _commands(ast.parse(path.read_text()))
    ]
    assert found == ["interpreter.py"]
    for script in ("nanotf-init", "nanotf-unset"):
        lines = (ROOT / "scripts" / script).read_text().splitlines()
        assert not [line for line in lines if " -m " in line and not line.startswith("#")]
