#!/usr/bin/env python3
"""Makes a release, checks it, and stops before the upload.

Usage: make_release.py [--rehearse]

It refuses to begin while an address is a placeholder, the changelog has no section of the version
or unreleased lines, the working tree has changes, or the version's tag is not on this commit. All
reasons are printed at once. `--rehearse` prints them, and does everything else.

Then it builds the archives (tools/build-dist, with auditwheel and `twine check --strict`), installs
the wheel in an empty environment, prints the time and the size, and runs the README's programs and
commands there, in an empty folder.

Environment variables read: PYTHON, the interpreter of the environments (default: this one).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import project_facts

ROOT = project_facts.ROOT
PYTHON = os.environ.get("PYTHON") or sys.executable
EXTRAS = "cpu,examples"  # as the README says
_SECTION = re.compile(r"^## \[([^]]+)\][^\n]*\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def reasons(version: str) -> Iterator[str]:
    """Yields the reasons why this commit cannot be released as a version."""
    fakes = project_facts.placeholders(project_facts.addresses())
    if fakes:
        yield (
            "The addresses of a release must exist. Received: "
            f"{', '.join(f'{name} = {url}' for name, url in fakes.items())}. "
            "Set them in pyproject.toml, [project.urls]."
        )
    sections = dict(_SECTION.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    released = [name for name in sections if name != "Unreleased"]
    if not released or released[0] != version or not sections[version].strip():
        yield (
            f"CHANGELOG.md must begin with a section of the version, {version}. Received: "
            f"{released[0] if released else 'no section'}. Add `## [{version}]`."
        )
    if sections.get("Unreleased", "").strip():
        yield (
            "A release must leave nothing unreleased. Received: lines under `## [Unreleased]` of "
            f"CHANGELOG.md. Move them to `## [{version}]`."
        )
    changes = _git("status", "--porcelain")
    if changes:
        yield (
            "The archives must hold a commit. Received: changes in "
            f"{', '.join(line[3:] for line in changes.splitlines()[:5])}. Commit them."
        )
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        yield (
            f"The tag v{version} must be on this commit: the links of the description lead to it. "
            f"Received: {_git('tag', '--points-at', 'HEAD') or 'no tag'}. "
            f"Run `git tag v{version}`, or raise `__version__`."
        )


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip("\n")


def build(folder: pathlib.Path) -> list[pathlib.Path]:
    """Builds and checks the archives. Returns the source distribution and the wheel."""
    _run([ROOT / "tools/build-dist", folder], env={**os.environ, "PYTHON": PYTHON})
    version = project_facts.version()
    (sources,) = folder.glob(f"nanotf-{version}.tar.gz")
    (wheel,) = folder.glob(f"nanotf-{version}-*.whl")
    return [sources, wheel]


def install(wheel: pathlib.Path, venv: pathlib.Path) -> dict[str, str]:
    """Installs a wheel as the README says, where no compiler is found.

    Returns:
        dict, the environment variables of a shell that has activated the new environment.
    """
    began = time.monotonic()
    _run([PYTHON, "-m", "venv", venv])
    empty = _bytes(venv)
    foreign = ("PYTHONPATH", "VIRTUAL_ENV", "CXX", "CXXFLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    pip = [venv / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, f"{wheel}[{EXTRAS}]"], env={**kept, "PATH": str(venv / "bin")})
    seconds, size = time.monotonic() - began, (_bytes(venv) - empty) / 1e9
    print(f"installed {wheel.name}[{EXTRAS}] in {seconds:.0f} s, {size:.2f} GB", flush=True)
    return {**kept, "PATH": f"{venv / 'bin'}{os.pathsep}{kept['PATH']}"}


def _bytes(folder: pathlib.Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())


def run_readme(environment: dict[str, str], folder: pathlib.Path) -> None:
    """Runs the README's programs, and its commands with the last of them, in a folder."""
    sys.path.insert(0, str(ROOT / "tests"))
    from documents import README, commands, python_blocks

    programs = [code for _, code in python_blocks(README)]
    *called, script = programs
    for number, code in enumerate(called, 1):
        path = folder / f"program_{number}.py"
        path.write_text(code, encoding="utf-8")
        _timed(f"program {number} of the README", ["python", path.name], environment, folder)
    (folder / "train.py").write_text(script, encoding="utf-8")
    for command in commands(README, "nanotf run"):
        _timed(command, shlex.split(command), environment, folder)


def _timed(
    what: str, command: list[str], environment: dict[str, str], folder: pathlib.Path
) -> None:
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{what} ended with {done.returncode}.\n{done.stdout}\n{done.stderr}")
    print(f"ran {what} in {time.monotonic() - began:.0f} s", flush=True)


def _run(command: list[str | pathlib.Path], env: dict[str, str] | None = None) -> None:
    if code := subprocess.run(command, env=env, check=False).returncode:
        raise SystemExit(f"{shlex.join(map(str, command))} ended with {code}.")


def main() -> int:
    """Makes the release. Returns the exit code: 1 if this commit cannot be released."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="do all else in spite of reasons")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "dist", help="default dist")
    options = parser.parse_args()
    version = project_facts.version()
    found = list(reasons(version))
    for reason in found:
        print(reason, file=sys.stderr, flush=True)
    if found and not options.rehearse:
        return 1
    archives = build(options.output.absolute())
    with tempfile.TemporaryDirectory(prefix="nanotf-release-") as name:
        place = pathlib.Path(name)
        environment = install(archives[1], place / "venv")
        (place / "empty").mkdir()
        run_readme(environment, place / "empty")
    if found:
        print(f"Rehearsed: nanotf {version} cannot be released yet, for the reasons above.")
        return 0
    print(f"nanotf {version} is ready. To publish it:")
    print(f"  git push origin v{version}")
    print(f"  .venv-dist/bin/twine upload {shlex.join(map(str, archives))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
