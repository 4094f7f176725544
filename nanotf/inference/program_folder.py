"""A program on the disk: a folder with program.json and the engine's files.

    folder/program.json   what it is; nanotf has made the folder if it is there
           engine/        the engine's files

A folder is written with another name, flushed to the disk, then renamed. Only a folder with such a
file is ever replaced, and only if it has nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import nanotf
from nanotf.errors import InvalidArgumentError
from nanotf.inference.signature import Signature
from nanotf.wire import files

FORMAT = 1  # a later nanotf that changes the content counts up: this one then refuses it
DESCRIPTION, FILES = "program.json", "engine"


@dataclasses.dataclass(frozen=True)
class Description:
    """The content of `DESCRIPTION`: the kind of a program."""

    engine: str
    precision: str
    signatures: dict[str, Signature]
    inputs: Any  # see `Exported`
    outputs: Any
    # By signature, why its rows must be computed by themselves; empty if they are apart. None if
    # nobody has looked.
    together: dict[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what is written to `DESCRIPTION`."""
        signatures = {name: signature.to_json() for name, signature in self.signatures.items()}
        return {
            "format": FORMAT,
            # For who looks for the cause of a difference. "nanotf" is in the error below, too.
            "nanotf": nanotf.__version__,
            "tensorflow": _tensorflow_version(),
            **vars(self),
            "signatures": signatures,
        }


def _tensorflow_version() -> str:
    # Not `tf.__version__`: a program of another engine is read and written without TensorFlow.
    for name in ("tensorflow", "tensorflow-cpu", "intel-tensorflow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def is_program(folder: pathlib.Path) -> bool:
    """Returns True if nanotf has written a folder as a program, which may be damaged since."""
    return (folder / DESCRIPTION).is_file()


def write_description(folder: pathlib.Path, description: Description) -> None:
    """Writes `DESCRIPTION`: the folder then is a program's."""
    files.write_json(folder / DESCRIPTION, description.to_json(), indent=1)


def read_description(folder: pathlib.Path) -> Description:
    """Reads `DESCRIPTION`.

    Raises:
        OSError: It cannot be read.
        Damaged: It is not what nanotf writes.
        InvalidArgumentError: A later version of nanotf has written it.
    """
    path = folder / DESCRIPTION
    found = files.read_json(path)
    # The format is read first, since a later one may have none of the other fields.
    with files.doubting(path):
        number = int(found["format"])
    if number > FORMAT:
        raise InvalidArgumentError(
            f"Programs up to format {FORMAT} can be read. Received: {path} with format {number}, "
            f"of nanotf {found.get('nanotf')}. Install that version, or make the program again."
        )
    with files.doubting(path):
        signatures = {str(k): Signature.from_json(v) for k, v in found["signatures"].items()}
        engine, precision = str(found["engine"]), str(found["precision"])
        together = {str(k): str(v) for k, v in found["together"].items()}
        structures = found["inputs"], found["outputs"]
        return Description(engine, precision, signatures, *structures, together)


def state_of(folder: pathlib.Path) -> tuple[int, ...]:
    """Returns numbers that change when another program takes a folder's place."""
    # Each program, and each SavedModel, is written with a new one of these files.
    wanted = (DESCRIPTION, "saved_model.pb", "saved_model.pbtxt")
    found = next(folder / name for name in wanted if (folder / name).is_file()).stat()
    # Time and size, too: a file system may give the inode of a deleted file to the next one.
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def written(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder that becomes `path` at the end, see `files.new_folder`.

    Raises:
        InvalidArgumentError: As `check_place`.
    """
    check_place(path)  # before a conversion of minutes, and not after it
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.new_folder(path) as folder:
        yield folder


def check_place(path: pathlib.Path) -> None:
    """Rejects a path where no program may be written.

    Raises:
        InvalidArgumentError: There is something at `path` that nanotf has not written.
    """
    if not os.path.lexists(path):  # a dangling link counts as the user's
        return
    found = _not_ours(path)
    if found is not None:
        raise InvalidArgumentError(
            f"A program is saved where nothing is, or another program. Received: {str(path)!r}, "
            f"{found} nanotf has not written. Pass another path, or remove it."
        )


def _not_ours(path: pathlib.Path) -> str | None:
    """Returns the words for what lies at a path and is not nanotf's; None if all of it is."""
    if path.is_symlink() or not path.is_dir():  # a rename would replace the link, not its folder
        return "which"
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return None
    try:
        read_description(path)
    except (OSError, files.Damaged):
        return "which"
    # The folder is replaced as a whole: files that the user has added would be lost.
    others = sorted(names - {DESCRIPTION, FILES})
    return f"a program's folder with {', '.join(others)}, which" if others else None
