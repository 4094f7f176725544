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

CODE = "code"  # the folder beside models that has the user's `inference.py`
_CACHE = "__pycache__"  # written by Python when it imports `inference.py`


def stamp_of(path: pathlib.Path, code: pathlib.Path | None = None) -> tuple[Any, ...]:
    """Returns the stamp of a file or of all files below a folder.

    Args:
        path: links are followed.
        code: another folder whose files belong to it, or None.

    Raises:
        OSError: They cannot be looked at; `FileNotFoundError` if they have just been removed.
    """
    found = list(_entries(path, path.stat(), "", frozenset()))
    if code is not None and not code.is_relative_to(path):
        found += _entries(code, code.stat(), CODE, frozenset())
    return tuple(sorted(found))


def _entries(
    path: str | pathlib.Path, status: os.stat_result, name: str, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[Any, ...]]:
    """Yields an entry for each file at or below a path.

    Args:
        name: of the path in the stamp.
        above: the folders that lead there, by device and inode.
    """
    identity = status.st_dev, status.st_ino
    if not stat.S_ISDIR(status.st_mode):
        yield name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, *identity
    elif identity not in above:  # a link may lead to a folder above
        with os.scandir(path) as entries:
            each = [(e.path, f"{name}/{e.name}", _status(e)) for e in entries if e.name != _CACHE]
        for inner, inner_name, inner_status in each:
            yield from _entries(inner, inner_status, inner_name, above | {identity})


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError:
        if not entry.is_symlink():
            raise
        return entry.stat(follow_symlinks=False)  # a link that leads nowhere, or in a circle
