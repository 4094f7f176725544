"""The folder of this user's cache, where nanotf keeps what it has measured."""

from __future__ import annotations

import os
import pathlib

from nanotf.errors import NanoError


class NoHomeError(NanoError):
    """The user has no home directory, and no variable names one."""


def folder() -> pathlib.Path:
    """Returns the folder's path: `$XDG_CACHE_HOME/nanotf`, or `~/.cache/nanotf`.

    Reads the environment variables XDG_CACHE_HOME and HOME. The folder need not exist.

    Raises:
        NoHomeError: Neither is set, and the user has no entry in the password database, as in a
            container that runs under an arbitrary user id.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification says to ignore a relative path.
        root = pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise NoHomeError(
            "Measurements are remembered in the user's cache directory. Received: a user without "
            "a home directory, and no HOME. Set XDG_CACHE_HOME to a directory."
        ) from error
    return root / "nanotf"
