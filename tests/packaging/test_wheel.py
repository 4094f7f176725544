"""The wheel installs what the README promises."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ("nanotf", "nanotf-init", "nanotf-unset")


def _run(*command: object, **more: object) -> str:
    more.setdefault("env", {**os.environ, "PIP_RETRIES": "10", "PIP_DEFAULT_TIMEOUT": "60"})
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **more,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel, built from a copy of the tracked and new files, like a release."""
    source = tmp_path_factory.mktemp("source")
    listed = _run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
            target.chmod((ROOT / name).stat().st_mode)
    out = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, source)
    (found,) = out.glob("nanotf-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A clean virtual environment with the wheel, its requirements, and no TensorFlow."""
    directory = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(directory, with_pip=True)
    _run(directory / "bin/python", "-m", "pip", "install", "--quiet", wheel)
    return directory


def _environment(directory: pathlib.Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": f"{directory / 'bin'}{os.pathsep}{kept['PATH']}"}


def test_wheel_holds_the_package_and_no_tests(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.startswith("nanotf-")} == {"nanotf"}
    for module in ("compat/distribute", "wire/blocks", "worker/zygote"):
        assert f"nanotf/{module}.py" in names


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_on_the_path(
    installed: pathlib.Path, script: str, tmp_path: pathlib.Path
) -> None:
    found = _run(
        "bash", "-c", f"command -v {script}", env=_environment(installed), cwd=tmp_path
    ).strip()
    assert found == str(installed / "bin" / script)
    assert os.access(found, os.X_OK)


def test_command_runs_without_tensorflow(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    _run("nanotf", "--help", env=_environment(installed), cwd=tmp_path)


def test_keras_says_which_extra_to_install(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code = "import nanotf\ntry:\n    import nanotf.keras\nexcept ImportError as e:\n    print(e)"
    said = _run(installed / "bin/python", "-c", code, cwd=tmp_path, env=_environment(installed))
    assert "nanotf[cpu]" in said
    assert "Received: no module" in said
