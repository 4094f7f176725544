"""Stamps of files: values that differ once a file has been written, replaced or moved.

A stamp has an entry for each file: its name, size, time of modification, inode, and time of the
inode's last change. The last one is there for files that were removed and created again: the new
file may get the old inode, and tools set the time of modification (`cp -p`, `rsync -t`, archives
that are made the same each time). No tool can set the time of the inode's change.
"""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

# Written by Python when it imports a model's `inference.py`.
_NOT_OF_THE_MODEL = "__pycache__"


def stamp_of(path: pathlib.Path, code: pathlib.Path | None = None) -> tuple[Any, ...]:
    """Returns the stamp of a file or of all files below a folder.

    Args:
        path: links are followed.
        code: another folder whose files belong to it, or None.

    Raises:
        OSError: They cannot be looked at; `FileNotFoundError` if they have just been removed.
    """
    found = list(_entries(os.fspath(path), "", frozenset()))
    if code is not None and not code.is_relative_to(path):
        found += _entries(os.fspath(code), "code", frozenset())
    return tuple(sorted(found))


def _entries(path: str, name: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[Any, ...]]:
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        times = status.st_mtime_ns, status.st_ctime_ns
        yield name, status.st_size, *times, status.st_ino, status.st_dev
        return
    identity = status.st_dev, status.st_ino
    if identity in above:  # a link to a folder above
        return
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries]
    for each in names:
        if each != _NOT_OF_THE_MODEL:
            yield from _entries(f"{path}/{each}", f"{name}/{each}", above | {identity})
