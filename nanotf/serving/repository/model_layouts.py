"""The models that a name of the command line stands for."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from nanotf import console
from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository import model_archive, model_files
from nanotf.serving.repository.model_sources import (
    ALL,
    LATEST,
    Source,
    VersionPolicy,
    absolute,
    check_model_name,
    version_number,
)
from nanotf.serving.repository.stamps import CODE

SCRIPT = "inference.py"  # the user's code, in a folder `CODE` beside the models
# Of the files that hold models, such as the one that a client names.
FILE_ENDINGS = (*model_archive.ENDINGS, *model_files.KERAS_ENDINGS)
_AT_THE_ROOT = "model"  # the name of a model that an archive holds without a folder, as SageMaker's
_NAME_IT = "Pass --name."
_SHOWN = 8  # entries of a folder in a message


def sources_of(
    model: str | os.PathLike[str],
    name: str | None = None,
    *,
    folder: pathlib.Path,
    policy: VersionPolicy | None = None,
    code: pathlib.Path | None = None,
    unpacked: bool = False,
    limit: int = model_archive.LIMIT,
) -> list[Source]:
    """Finds what the MODEL of a command line is.

    Args:
        model: str or path, one of: the folder of a SavedModel or of a program of
            `nanotf.inference`; a folder of version folders (their names are digits); a file that
            Keras has saved (`.keras`, `.h5`) or a folder with such files; `model.tar.gz`; a folder
            that has one model somewhere below it, such as `export/Servo/1`.
        name: str, the name of the model. By default that of its folder, or of its file without the
            ending; "model" for one at the root of an archive.
        folder: a private folder, into which archives are unpacked. The caller removes it, once
            nothing is served from it.
        policy: default `LATEST`; for archives and unpacked ones `ALL`, as SageMaker.
        code: a folder with `inference.py`. By default the folder `code` of `model`, if it has one.
        unpacked: bool, default False; True for a folder in which an archive was unpacked, such as
            /opt/ml/model of a SageMaker container. It may hold several models.
        limit: int, bytes that an archive may unpack to.

    Returns:
        The models, by name. Archives and unpacked ones may have several.

    Raises:
        InvalidArgumentError: There is no model; there are several where one is meant; the archive
            cannot be unpacked; or a name cannot be a part of URLs.
    """
    path = absolute(model)
    if code is not None:
        code = _checked_code(absolute(code))
    if path.is_file() and not model_files.is_keras_file(path):
        path, unpacked = model_archive.unpack(path, folder, limit), True
    elif not path.exists():
        raise InvalidArgumentError(f"MODEL must exist. Received: {path}. Check its path.")
    policy = policy or (ALL if unpacked else LATEST)
    home = path if code is None else None
    code = code or code_of(path)
    own_name = _AT_THE_ROOT if unpacked else path.name
    found = source_at(path, own_name, policy)
    if unpacked and found and found.number is None and not _holds_a_model(path):
        found = None  # folders of other content whose names are digits
    sources = [found] if found else list(_below(path, policy))
    if not sources and code is not None:  # which computes by itself, from files of its own
        sources = [Source(own_name, path, 1)]
    sources = sorted(sources, key=lambda source: source.model)
    _check_number(sources, path, unpacked, name)
    named = [dataclasses.replace(s, model=name or s.model, code=code, home=home) for s in sources]
    for source in named:
        check_model_name(source.model, _NAME_IT)
    check_distinct(named)
    return named


def code_of(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder with the user's `inference.py` that belongs to a folder's models."""
    return folder / CODE if (folder / CODE / SCRIPT).is_file() else None


def source_at(path: pathlib.Path, name: str, policy: VersionPolicy) -> Source | None:
    """Returns the model whose version or versions are at a path, or None.

    Args:
        path: the model's or its version's folder, or a Keras file.
        name: of the model, if its folder does not name it.
    """
    if path.is_file():
        return Source(path.name.rpartition(".")[0], path, 1)
    if model_files.is_model_folder(path):
        number = version_number(path.name)
        if number is None:
            return Source(name, path, 1)
        return Source(name if name != path.name else path.parent.name, path, number)
    if any(version_number(each.name) is not None for each in _folders(path)):
        return Source(name, path, policy=policy)
    return None


class ModelsFolder:
    """A folder of models, each with its version folders. They may come and leave.

    Args:
        path: the folder.
        policy: of each model.

    Raises:
        InvalidArgumentError: It is no folder.
    """

    def __init__(self, path: str | os.PathLike[str], policy: VersionPolicy = LATEST) -> None:
        self.path, self._policy = absolute(path), policy
        self._found: list[Source] = []
        if not self.path.is_dir():
            raise InvalidArgumentError(f"--models-dir must be a folder. Received: {self.path}.")

    def sources(self) -> Sequence[Source]:
        """Returns the models that are there now, by name.

        A folder that is empty now is more likely not mounted than meant: the models stay.

        Raises:
            OSError: The folder is not there, or the file system does not answer.
        """
        self._found = list(self._sources()) or self._found
        return self._found

    def _sources(self) -> Iterator[Source]:
        for folder in _folders(self.path):
            try:
                check_model_name(folder.name, "Rename its folder.")
            except InvalidArgumentError as error:
                console.warn_once("%s is not served. %s", str(folder), str(error))
                continue
            files = model_files.keras_files(folder)
            found = source_at(folder, folder.name, self._policy)
            if found is None and len(files) == 1:
                found = Source(folder.name, folder, 1)
            if found is not None:
                code = code_of(folder)
                yield dataclasses.replace(found, model=folder.name, code=code, home=folder)


def check_distinct(sources: Iterable[Source]) -> None:
    """Rejects models of one name.

    Raises:
        InvalidArgumentError: Two have the same name.
    """
    paths: dict[str, pathlib.Path] = {}
    for source in sources:
        if source.model in paths:
            raise InvalidArgumentError(
                f"Each model must have a name of its own. Received: {source.model!r} at "
                f"{paths[source.model]} and at {source.path}. Rename one of them."
            )
        paths[source.model] = source.path


def _checked_code(code: pathlib.Path) -> pathlib.Path:
    if not (code / SCRIPT).is_file():
        raise InvalidArgumentError(
            f"--code must be a folder with {SCRIPT}. Received: {code} ({_content(code)})."
        )
    return code


def _folders(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in path.iterdir() if not p.name.startswith(".") and p.is_dir())


def _below(root: pathlib.Path, policy: VersionPolicy) -> Iterator[Source]:
    """Yields the Keras models in a folder, and the models of the folders below it."""
    for file in model_files.keras_files(root):
        yield Source(file.name.rpartition(".")[0], file, 1)
    rest, seen = [f for f in _folders(root) if f.name != CODE], set[tuple[int, int]]()
    while rest:
        folder = rest.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:  # by a link
            continue
        seen.add((status.st_dev, status.st_ino))
        found = source_at(folder, folder.name, policy)
        if found is not None and (found.number is not None or _holds_a_model(folder)):
            yield found
        else:
            rest += _folders(folder)


def _holds_a_model(folder: pathlib.Path) -> bool:
    """Returns True if a version folder of a folder holds a model."""
    return any(
        version_number(version.name) is not None and model_files.model_at(version) is not None
        for version in _folders(folder)
    )


def _check_number(
    sources: Sequence[Source], path: pathlib.Path, unpacked: bool, name: str | None
) -> None:
    if not sources:
        raise InvalidArgumentError(
            "MODEL must be a SavedModel's folder, a folder of version folders, a .keras or .h5 "
            "file, a folder that nanotf.inference has saved, or a model.tar.gz. Received: "
            f"{path} ({_content(path)})."
        )
    names = ", ".join(source.model for source in sources)
    if len(sources) > 1 and not unpacked:
        raise InvalidArgumentError(
            f"MODEL must be one model. Received: {path}, which holds several: {names}. Name one "
            "of them, or pass the folder as --models-dir to serve all."
        )
    if len(sources) > 1 and name is not None:
        raise InvalidArgumentError(
            f"--name is for one model. Received: {name!r}, and an archive of several: {names}. "
            "Leave it out."
        )


def _content(path: pathlib.Path) -> str:
    if not path.is_dir():
        return "not a folder" if path.exists() else "no such folder"
    names = sorted(repr(entry.name)[1:-1] for entry in path.iterdir())
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"a folder with {', '.join(names[:_SHOWN])}{more}" if names else "an empty folder"
