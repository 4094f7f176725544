"""What trials have measured, remembered in a file; see `tuning`.

The file is `nanotf/tuning.json` in the user's cache directory: `$XDG_CACHE_HOME`, or `~/.cache`.
It holds what was measured, by the hash of model, data, machine and versions. Whoever reads while
another process writes finds the old or the new file, whole; of two that write, the last wins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import tempfile
from typing import Any

from nanotf.errors import NanoError

VERSION = 1  # of the file; one of another version is not read

logger = logging.getLogger("nanotf")


def path() -> pathlib.Path:
    """The file. Environment variables read: `XDG_CACHE_HOME`, `HOME`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".cache"
    return root / "nanotf" / "tuning.json"


def entries() -> dict[str, Any]:
    """All that is remembered; nothing where the file is missing or is none of nanotf's."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        if found["version"] == VERSION:
            return dict(found["entries"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read, and is not used: %r", path(), error)
    return {}


def remember(key: str, entry: dict[str, Any]) -> None:
    """Adds an entry; where the file cannot be written, a warning says so, and no more."""
    content = json.dumps({"version": VERSION, "entries": {**entries(), key: entry}}, indent=1)
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix="tuning-", suffix=".tmp")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(content)
            pathlib.Path(temporary).replace(target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                pathlib.Path(temporary).unlink()
            raise
    except OSError as error:
        logger.warning("What was measured cannot be remembered in %s: %s", target, error)


def clear() -> int:
    """Forgets everything; returns how many entries there were.

    Raises:
        NanoError: The file cannot be removed.
    """
    count = len(entries())
    try:
        path().unlink(missing_ok=True)
    except OSError as error:
        raise NanoError(
            f"The file of measurements must be removable. Received: {path()}, {error.strerror}. "
            "Remove it by hand."
        ) from error
    return count
