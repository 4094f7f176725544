"""`make release` begins only with what a release needs, and says all that is missing."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from release import copy, run

FILES = ["tools/make_release.py", "tools/project_facts.py"]
PROJECT = '[project.urls]\nHomepage = "https://nanotf.dev/"\nSource = "https://nanotf.dev/git"\n'
BUILD = "#!/bin/sh\nexit 7\n"  # in place of tools/build-dist
BEGUN = "ended with 7."  # the release has begun


@pytest.fixture
def clone(tmp_path: pathlib.Path) -> pathlib.Path:
    """A repository that can be released, of version 0.9."""
    copy(FILES, tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "nanotf").mkdir()
    (tmp_path / "nanotf/__init__.py").write_text('__version__ = "0.9"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.9]\n\n- News.\n")
    (tmp_path / "tools/build-dist").write_text(BUILD)
    (tmp_path / "tools/build-dist").chmod(0o755)
    _git(tmp_path, "init")
    _commit(tmp_path)
    _git(tmp_path, "tag", "v0.9")
    return tmp_path


def _replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _git(clone: pathlib.Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    run("git", "-C", clone, *who, *arguments)


def _commit(clone: pathlib.Path) -> None:
    (clone / ".gitignore").write_text("__pycache__\n")
    _git(clone, "add", "--all")
    _git(clone, "commit", "--quiet", "-m", "all")


def _release(clone: pathlib.Path, *arguments: str) -> str:
    """Returns what `make release` says against the release."""
    command = [sys.executable, clone / "tools/make_release.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


def test_it_begins_where_nothing_is_missing(clone: pathlib.Path) -> None:
    assert BEGUN in _release(clone)


def test_all_reasons_are_printed_at_once(clone: pathlib.Path) -> None:
    _replace(clone / "pyproject.toml", "nanotf.dev", "example.com")
    (clone / "CHANGELOG.md").write_text("## [Unreleased]\n\n- More.\n\n## [0.8]\n\n- News.\n")
    _commit(clone)
    (clone / "new.txt").write_text("")
    said = _release(clone)
    assert "Received: Homepage = https://example.com/, Source = https://example.com/git." in said
    assert "must begin with a section of the version, 0.9. Received: 0.8." in said
    assert "lines under `## [Unreleased]`" in said
    assert "changes in new.txt." in said
    assert "Received: no tag. Run `git tag v0.9`" in said
    assert BEGUN not in said
    rehearsed = _release(clone, "--rehearse")
    assert rehearsed.startswith(said)
    assert BEGUN in rehearsed


def test_one_reason_is_enough(clone: pathlib.Path) -> None:
    _replace(clone / "nanotf/__init__.py", "0.9", "1.0")
    _commit(clone)
    said = _release(clone)
    assert said.count("Received") == 2
    assert "The tag v1.0 must be on this commit" in said
    assert BEGUN not in said
