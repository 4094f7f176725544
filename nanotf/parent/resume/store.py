"""Checkpoints in a folder. Each is written whole or not at all, and checked when it is read.

    folder/nanotf-resume/lock                          held by the run that writes
                         checkpoint-00000012/marker    says that nanotf has made the folder
                                             manifest.json   what it is, as JSON, and the checksums
                                             arrays.npz      the arrays, without pickles
    folder/00000011/                                   of earlier versions of nanotf

A checkpoint is written in a folder with another name, flushed to the disk, then renamed. So a
process or a machine that stops at any moment leaves the checkpoints before it. Only folders with a
marker are ever deleted: everything else is somebody else's, those of earlier versions included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.wire import files

FORMAT = 2
KEPT = 2  # the newest, and the one before
OWN, _LOCK = "nanotf-resume", "lock"
_MANIFEST, _ARRAYS, _MARKER = "manifest.json", "arrays.npz", "marker"
_NAME, _UNFINISHED = "checkpoint-", ".checkpoint-*.part"  # as `files.new_folder` names it
# Of files that a writer that died has not made. Other errors are the disk's, and may pass.
_INCOMPLETE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NUMBER = re.compile(rf"{_NAME}([0-9]{{8,}})", re.ASCII)
_OLD_NUMBER = re.compile(r"([0-9]{8,})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint that was read."""

    path: pathlib.Path  # its folder
    manifest: dict[str, Any]  # what `Folder.write` got, and the format and the arrays' checksum
    arrays: dict[str, np.ndarray[Any, Any]]  # by the names that `Folder.write` got


class Folder:
    """A folder of checkpoints; it is made if it does not exist.

    Args:
        path: the argument `resume` of `fit`, a str or a path.

    Attributes:
        path: `pathlib.Path`, the user's folder.
        own: `pathlib.Path`, the folder in it that nanotf alone writes to.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: It cannot be used.
    """

    def __init__(self, path: Any) -> None:
        self._lock: files.Lock | None = None
        try:
            self.path = pathlib.Path(os.fsdecode(path)).absolute()
        except TypeError:
            raise InvalidArgumentTypeError(
                f"`resume` must be the path of a folder. Received: resume={path!r}. Pass a path "
                'such as resume="checkpoints".'
            ) from None
        if not os.fspath(path):
            raise InvalidArgumentError(
                "`resume` must be the path of a folder. Received: resume='', which would be the "
                'current one. Pass a path such as resume="checkpoints", or "." to mean it.'
            )
        try:
            self.own = self.path / OWN
            self.own.mkdir(parents=True, exist_ok=True)
            # Finds out now, before training, whether files can be written.
            with tempfile.TemporaryFile(dir=self.own):
                pass
        except OSError as error:
            raise InvalidArgumentError(
                f"`resume` must be a folder that can be written. Received: resume={path!r}, and "
                f"the system reports: {error}. Pass another folder."
            ) from error

    def lock(self) -> None:
        """Keeps all other runs from the folder until `release`, or the end of the process.

        Where the file system has no locks, only a warning says that two runs would disturb each
        other.

        Raises:
            InvalidArgumentError: Another run uses it.
        """
        try:
            self._lock = files.Lock(self.own / _LOCK)
        except files.LockHeld as held:
            here = f"process {os.getpid()} on "  # how `LockHeld` begins if it is this process
            mine = f"another fit in this process (pid {os.getpid()})"
            who = mine if str(held).startswith(here) else str(held)
            raise InvalidArgumentError(
                "A folder of checkpoints serves one fit at a time. Received: resume="
                f"'{self.path}', which {who} uses. Wait until that ends, or pass another folder."
            ) from None
        except OSError as error:  # some file systems of clusters have no locks
            logger.warning(
                "The folder %s cannot be locked (%s). Start no other training that writes its "
                "checkpoints there.",
                self.path,
                error,
            )

    def release(self) -> None:
        """Lets others use the folder; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()

    def _numbered(self) -> list[tuple[int, pathlib.Path]]:
        """Returns the checkpoints, by number; all are in one series, whoever has written them."""
        own = ((_NUMBER.fullmatch(p.name), p) for p in self.own.iterdir() if _is_marked(p))
        old = (
            (_OLD_NUMBER.fullmatch(path.name), path)
            for path in self.path.iterdir()
            if (path / _MANIFEST).is_file()
        )
        return sorted((int(m[1]), path) for m, path in itertools.chain(own, old) if m)

    def _next_number(self) -> int:
        """Returns a number above all others, those of folders included that are not nanotf's."""
        taken = map(_NUMBER.fullmatch, (path.name for path in self.own.iterdir()))
        numbers = [number for number, _ in self._numbered()]
        return max([*numbers, *(int(match[1]) for match in taken if match)], default=0) + 1

    def newest_first(self) -> Iterator[Stored]:
        """Yields the checkpoints that are complete; warns of each other one.

        Raises:
            OSError, MemoryError: One cannot be read now. Training from an earlier one would delete
                it.
        """
        for _, path in reversed(self._numbered()):
            try:
                yield _read(path)
            except (*_INCOMPLETE, files.Damaged) as error:
                warn_of_damage(path, error)

    def write(self, manifest: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Writes a checkpoint, and deletes all but the newest `KEPT`.

        Args:
            manifest: values that JSON can hold.
            arrays: `numpy.ndarray` by name.
        """
        with files.new_folder(self.own / f"{_NAME}{self._next_number():08}") as made:
            (made / _MARKER).touch()  # first: of a run that dies, `_delete_old` takes the rest
            # Not `np.savez(**arrays)`: a name may be that of an argument.
            with zipfile.ZipFile(made / _ARRAYS, "w", allowZip64=True) as archive:
                for name, array in arrays.items():
                    # `zipfile` must know before it writes that a member may exceed 2 GiB.
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            content = {"format": FORMAT, "sha256": _sha256(made / _ARRAYS), **manifest}
            whole = {"sha256": _sha256_of(content), "content": content}
            files.write_json(made / _MANIFEST, whole, indent=1)
        # The new name is on the disk before older checkpoints are deleted.
        self._delete_old()

    def _delete_old(self) -> None:
        # One run at a time writes here (`lock`): unfinished folders are of runs that died.
        own = [path for _, path in self._numbered() if path.parent == self.own]
        for path in itertools.chain(own[:-KEPT], self.own.glob(_UNFINISHED)):
            if _is_marked(path):
                _remove(path)


def warn_of_damage(path: pathlib.Path, error: Exception) -> None:
    """Says in one line that a checkpoint is not used."""
    logger.warning(
        "The checkpoint %s cannot be used (%s); training resumes from the one before it, or from "
        "the beginning.",
        path,
        error,
    )


def _is_marked(path: pathlib.Path) -> bool:
    return (path / _MARKER).is_file() and not path.is_symlink()  # a link may be somebody else's


def _remove(path: pathlib.Path) -> None:
    """Deletes what nanotf has written in a folder, and the folder if nothing else is in it.

    The mark goes last: a run that dies meanwhile leaves the rest to the next.
    """
    unfinished = path.glob(f".{_MANIFEST}.*.part")  # of `files.write_json`
    with contextlib.suppress(OSError):
        for part in (path / _ARRAYS, *unfinished, path / _MANIFEST, path / _MARKER):
            part.unlink(missing_ok=True)
        path.rmdir()


def _read(path: pathlib.Path) -> Stored:
    """Reads a checkpoint.

    Raises:
        OSError, Damaged: It is incomplete, or has changed since it was written.
        InvalidArgumentError: Another version of nanotf has written it.
    """
    whole = files.read_json(path / _MANIFEST)
    with files.doubting(path / _MANIFEST):
        content, found = whole["content"], whole["sha256"]
        if found != _sha256_of(content):
            raise files.Damaged(f"{_MANIFEST} has changed")
        version = content["format"]
    if version != FORMAT:
        raise InvalidArgumentError(
            f"A resumed fit can read checkpoints of format {FORMAT}. Received: {path}, of "
            f"format {version}, written by nanotf {content.get('versions')}. Use "
            "that version, or another folder."
        )
    with files.doubting(path / _ARRAYS):
        if content["sha256"] != _sha256(path / _ARRAYS):
            raise files.Damaged(f"{_ARRAYS} is incomplete or has changed")
        with np.load(path / _ARRAYS, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    return Stored(path, content, arrays)


def _sha256_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
