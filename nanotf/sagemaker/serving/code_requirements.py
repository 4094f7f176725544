"""Packages that a model's `code/requirements.txt` asks for.

A SageMaker container installs them into its only environment. A server on your machine must not
change yours, nor fetch packages because a model asks for them. So they are installed only where
that was allowed, into a folder beside the file, `.environment`, which sees your packages and holds
what they do not satisfy. As in a container, `code/lib` comes instead of the file if both are there.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess

from nanotf.console import logger
from nanotf.errors import NanoError
from nanotf.sagemaker.jobs import packages

_ENVIRONMENT = ".environment"


def prepare(code: pathlib.Path, *, allowed: bool) -> None:
    """Installs what a model's code needs. A server calls it once, before its workers load the code.

    Args:
        code: the folder with `inference.py`. It must be writable if something is to be installed.
        allowed: whether packages may be fetched. If not, one line names the file.

    Raises:
        NanoError: pip failed, or the folder cannot be written.
    """
    requirements = code / "requirements.txt"
    if not requirements.is_file():
        return
    if (code / "lib").is_dir():
        logger.warning("%s is ignored, since the folder lib is beside it.", requirements)
    elif not allowed:
        logger.warning(
            "%s is not installed. Install it yourself, or pass --install-requirements.",
            requirements,
        )
    else:
        _install(requirements, code / _ENVIRONMENT)


def _install(requirements: pathlib.Path, folder: pathlib.Path) -> None:
    part = folder.with_name(f"{folder.name}.part")
    try:
        # Of an install that was cut short, and of an earlier start: the file may have changed.
        for old in (part, folder):
            shutil.rmtree(old, ignore_errors=True)
        packages.install(requirements, part)
        part.rename(folder)  # only its packages are used, and they can be moved
    except (OSError, subprocess.CalledProcessError) as error:
        raise NanoError(
            f"The packages of {requirements} could not be installed: {error}. pip has said why, "
            "above. A server also takes packages from a folder `lib` beside that file."
        ) from error


def installed(code: pathlib.Path) -> list[str]:
    """Returns the folder of the packages that `prepare` has installed, in a list; or none."""
    folder = packages.site_packages(code / _ENVIRONMENT)
    return [str(folder)] if folder.is_dir() else []
