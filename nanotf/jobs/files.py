"""Files that other processes read at any moment: written whole or not at all."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step. A reader sees the old text or the new one.

    Raises:
        OSError: The disk is full or not writable. The old file is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: pathlib.Path, value: Any, *, indent: int | None = None) -> None:
    """Replaces a JSON file in one step. Raises `OSError` as `write_text` does."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
