"""Models on disk: which files are one, and which of its parts are not there yet.

A version folder may be half copied. Time alone does not show that, since a copy may pause. So each
format is looked through for what it says of itself: the lengths in `saved_model.pb`, its assets,
the data files that the index of the variables names and their least sizes, the directory at the end
of a zip file, the length that an HDF5 file states.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterator

from nanotf.serving.repository import wire_format
from nanotf.serving.repository.wire_format import NotWholeError

PROGRAM = "program.json"  # the file that makes a folder a program of `nanotf.inference`
_ENGINE = "engine"  # the folder in it with the engine's files
KERAS_ENDINGS = (".keras", ".h5", ".hdf5")
_WEIGHTS = ".weights.h5"  # Keras demands this ending of weights alone

_SAVED_MODEL = "saved_model.pb"
# As text, or in several pieces; TensorFlow loads them in place of `saved_model.pb`.
_OTHER_FORMS = ("saved_model.pbtxt", "saved_model.cpb")
_VARIABLES = "variables/variables"

# Numbers of fields.
_META_GRAPHS = 2  # SavedModel
_SAVER, _ASSETS, _OBJECTS = 3, 6, 7  # MetaGraphDef: saver_def, asset_file_def, object_graph_def
_FILE_NAME = 2  # AssetFileDef

_HDF5 = b"\x89HDF\r\n\x1a\n"
# Where the superblock of an HDF5 file states the file's length in bytes, by the block's version.
_HDF5_LENGTH = {0: 40, 1: 44, 2: 28, 3: 28}


def is_keras_file(path: pathlib.Path) -> bool:
    """Returns True for a file that Keras has saved a model in, by its name."""
    name = path.name
    named = name.endswith(KERAS_ENDINGS) and not name.endswith(_WEIGHTS)
    return named and not name.startswith(".") and path.is_file()


def keras_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files in a folder that Keras has saved a model in, by name."""
    return sorted(path for path in folder.iterdir() if is_keras_file(path))


def is_model_folder(folder: pathlib.Path) -> bool:
    """Returns True for the folder of a SavedModel or of a program, whole or not."""
    return any((folder / name).is_file() for name in (PROGRAM, _SAVED_MODEL, *_OTHER_FORMS))


def model_at(path: pathlib.Path) -> pathlib.Path | None:
    """Returns what is to be loaded of a version: its folder, or the one Keras file in it.

    Args:
        path: a folder or a Keras file.

    Returns:
        None if there is no model, or more than one.

    Raises:
        OSError: The file system does not answer.
    """
    if not path.is_dir():
        return path if is_keras_file(path) else None
    if is_model_folder(path):
        return path
    files = keras_files(path)
    return files[0] if len(files) == 1 else None


def lacking(model: pathlib.Path) -> str | None:
    """Returns what a model lacks to be whole, for a message; None if nothing is missing.

    Args:
        model: from `model_at`.

    Raises:
        OSError: The file system does not answer; `FileNotFoundError` if a file was just removed.
    """
    checks = _keras_file if model.is_file() else _folder
    return next(iter(checks(model)), None)


def _folder(folder: pathlib.Path) -> Iterator[str]:
    if not (folder / PROGRAM).is_file():
        yield from _saved_model(folder)
        return
    try:
        json.loads((folder / PROGRAM).read_bytes())
    except ValueError:
        yield f"{PROGRAM} is not whole"
    engine = folder / _ENGINE
    if not (engine.is_dir() and any(engine.iterdir())):
        yield f"{_ENGINE} is missing"
        return
    yield from (f"{_ENGINE}/{lack}" for lack in _saved_model(engine))


def _saved_model(folder: pathlib.Path) -> Iterator[str]:
    wanted = False
    if (folder / _SAVED_MODEL).is_file():
        try:
            wanted, assets = _outline(folder / _SAVED_MODEL)
        except NotWholeError as error:
            yield f"{_SAVED_MODEL} is not whole: {error}"
            return
        yield from (f"{name} is missing" for name in assets if not (folder / name).is_file())
    yield from _variables(folder, wanted)


def _outline(file: pathlib.Path) -> tuple[bool, list[str]]:
    """Returns whether a SavedModel has variables, and its assets."""
    with file.open("rb") as stream:
        read = wire_format.reader_of(stream.fileno())
        size = os.fstat(stream.fileno()).st_size
        graphs = [
            part
            for number, start, end in wire_format.fields(read, 0, size)
            if number == _META_GRAPHS
            for part in wire_format.fields(read, start, end)
        ]
        if not graphs:
            raise NotWholeError("it holds no graph")
        names = [
            read(start, end - start).decode("utf-8", "surrogateescape")
            for asset, first, last in graphs
            if asset == _ASSETS
            for number, start, end in wire_format.fields(read, first, last)
            if number == _FILE_NAME
        ]
    # A model of TensorFlow 2 has an index even if it has no variables; one of TensorFlow 1 has
    # then neither an index nor a saver.
    wanted = any(number in (_SAVER, _OBJECTS) for number, _, _ in graphs)
    return wanted, [f"assets/{name}" for name in names]


def _variables(folder: pathlib.Path, wanted: bool) -> Iterator[str]:
    index = folder / f"{_VARIABLES}.index"
    if not index.is_file():
        # Data without an index: it is still to come.
        if wanted or (index.parent.is_dir() and any(index.parent.iterdir())):
            yield f"{_VARIABLES}.index is missing"
        return
    try:
        sizes = wire_format.shard_sizes(index.read_bytes())
    except NotWholeError as error:
        yield f"{_VARIABLES}.index is not whole: {error}"
        return
    for shard, size in enumerate(sizes):
        name = f"{_VARIABLES}.data-{shard:05}-of-{len(sizes):05}"
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif (folder / name).stat().st_size < size:
            yield f"{name} is too short"


def _keras_file(file: pathlib.Path) -> Iterator[str]:
    with file.open("rb") as stream:
        head = stream.read(64)
        size = os.fstat(stream.fileno()).st_size
        if head.startswith(_HDF5):  # Keras 2 and 3 load such a file under any name
            place = _HDF5_LENGTH.get(head[8], 0) if len(head) == 64 else 0
            if not place or struct.unpack_from("<Q", head, place)[0] > size:
                yield f"{file.name} is not a whole HDF5 file"
            return
        try:
            with zipfile.ZipFile(stream) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile:
            yield f"{file.name} is not whole"
            return
        if "config.json" not in names:
            yield f"{file.name} is not a file that Keras has saved"
