"""Checkpoints in a folder. Each is written whole or not at all, and checked when it is read.

    folder/00000012/manifest.json   what the checkpoint is, as JSON, and the checksums
                    arrays.npz      the arrays, in NumPy's format, without pickles

A checkpoint is written in a folder with another name, flushed to the disk, then renamed. So a
process or a machine that stops at any moment leaves the checkpoints before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError

FORMAT = 2
KEPT = 2  # the newest, and the one before
_MANIFEST, _ARRAYS, _UNFINISHED = "manifest.json", "arrays.npz", ".unfinished-"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint that was read.

    Args:
        path: `pathlib.Path`, its folder.
        manifest: dict, see `Folder.write`.
        arrays: dict of str to `numpy.ndarray`.
    """

    path: pathlib.Path
    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]


class Damaged(Exception):
    """A checkpoint is incomplete or has changed since it was written."""


class Folder:
    """A folder of checkpoints; it is made if it does not exist.

    Args:
        path: str or path.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: It cannot be used.
    """

    def __init__(self, path: Any) -> None:
        try:
            self.path = pathlib.Path(os.fsdecode(path)).absolute()
        except TypeError:
            raise InvalidArgumentTypeError(
                f"`resume` must be the path of a folder. Received: resume={path!r}. Pass a path "
                'such as resume="checkpoints".'
            ) from None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.path):
                pass
        except OSError as error:
            raise InvalidArgumentError(
                f"`resume` must be a folder that can be written. Received: resume={path!r}, and "
                f"the system reports: {error}. Pass another folder."
            ) from error

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if path.name.isdigit())

    def newest_first(self) -> Iterator[Stored]:
        """Yields the checkpoints that are complete; warns of each other one."""
        for name in reversed(self._names()):
            try:
                yield _read(self.path / name)
            except Damaged as error:
                logger.warning(
                    "The checkpoint %s cannot be used (%s); training resumes from the one "
                    "before it, or from the beginning.",
                    self.path / name,
                    error,
                )

    def write(self, manifest: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Writes a checkpoint, and deletes all but the newest `KEPT`.

        Args:
            manifest: mapping, ready for JSON.
            arrays: mapping of str to `numpy.ndarray`.
        """
        names = self._names()
        made = pathlib.Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.path))
        try:
            with (made / _ARRAYS).open("wb") as file:
                # Not `np.savez(**arrays)`: a name may be that of an argument.
                with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, array, allow_pickle=False)
                _flush(file)
            content = {"format": FORMAT, "sha256": _sha256(made / _ARRAYS), **manifest}
            with (made / _MANIFEST).open("w") as text:
                json.dump({"sha256": _sha256_of(content), "content": content}, text, indent=1)
                _flush(text)
            number = int(names[-1]) + 1 if names else 1
            made.chmod(0o755)
            made.rename(self.path / f"{number:08}")
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        _flush_folder(self.path)
        self._delete_old()

    def _delete_old(self) -> None:
        old = [self.path / name for name in self._names()[:-KEPT]]
        for path in itertools.chain(old, self.path.glob(f"{_UNFINISHED}*")):
            shutil.rmtree(path, ignore_errors=True)


def _read(path: pathlib.Path) -> Stored:
    try:
        whole = json.loads((path / _MANIFEST).read_text())
        content = whole["content"]
        if whole["sha256"] != _sha256_of(content):
            raise Damaged(f"{_MANIFEST} has changed")
        if content["format"] != FORMAT:
            raise InvalidArgumentError(
                f"A resumed fit can read checkpoints of format {FORMAT}. Received: {path}, of "
                f"format {content['format']}, written by nanotf {content.get('versions')}. Use "
                "that version, or another folder."
            )
        if content["sha256"] != _sha256(path / _ARRAYS):
            raise Damaged(f"{_ARRAYS} is incomplete or has changed")
        with np.load(path / _ARRAYS, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    return Stored(path, content, arrays)


def _sha256_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
