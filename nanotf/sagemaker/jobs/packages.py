"""Packages that a job's `requirements.txt` asks for, in an environment of the job's own.

A container installs them into its only environment. A job must not change yours: it gets a
virtual environment that sees your packages, and installs into it what they do not satisfy.
"""

from __future__ import annotations

import pathlib
import site
import subprocess
import sysconfig
import venv

from nanotf.machine.interpreter import python_command


def install(requirements: pathlib.Path, folder: pathlib.Path) -> str:
    """Makes an environment in a folder, and installs what a file asks for.

    Args:
        requirements: a `requirements.txt`.
        folder: the environment, created.

    Returns:
        The environment's Python.

    Raises:
        subprocess.CalledProcessError: pip failed. Its messages are on standard error.
    """
    # No pip inside, which takes seconds: this Python's installs there by --python (pip 22.3).
    venv.EnvBuilder(system_site_packages=True, with_pip=False).create(folder)
    python = folder / "bin" / "python"
    inside = site_packages(folder)
    # `system_site_packages` adds those of the base Python. If the launcher runs in a virtual
    # environment, too, its own are elsewhere.
    # `addsitedir` also reads the .pth files there, which editable installs consist of.
    outside = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    lines = [f"import site; site.addsitedir({path!r})" for path in [*outside, *user]]
    (inside / "_packages_of_the_launcher.pth").write_text("\n".join(lines) + "\n")
    pip = python_command("pip", "--python", str(python), "install", "-r", str(requirements))
    # Relative lines of the file, such as ./wheel.whl, are relative to the code.
    subprocess.run(pip, cwd=requirements.parent, check=True)
    return str(python)


def site_packages(folder: pathlib.Path) -> pathlib.Path:
    """Returns where the packages of an environment are, whether it exists or not.

    Args:
        folder: as for `install`.
    """
    variables = {"base": str(folder), "platbase": str(folder)}
    return pathlib.Path(sysconfig.get_path("purelib", "posix_prefix", variables))
