"""Places on disk that hold the versions of a model, and the versions that a server takes there."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from nanotf.errors import InvalidArgumentError

PLACES = "version-"  # begins the names of what `ModelVersion.place_in` returns
_LARGEST = 2**63 - 1  # the number of a version is an int64 in TensorFlow Serving's interfaces


@dataclasses.dataclass(frozen=True)
class ModelVersion:
    """A version of a model, as it lies on disk. Changed files make another value."""

    model: str
    number: int
    path: pathlib.Path  # a SavedModel's folder, a `.keras` or `.h5` file, or a program's folder
    code: pathlib.Path | None  # the folder with the model's `inference.py`, if it has one
    stamp: tuple[Any, ...]  # of the files, see `stamps.py`

    def place_in(self, folder: pathlib.Path) -> pathlib.Path:
        """Returns the folder for what a server makes of this version; other files get another."""
        digest = hashlib.sha256(repr((self.path, self.stamp)).encode()).hexdigest()[:16]
        return folder / f"{PLACES}{self.number}-{digest}"


@dataclasses.dataclass(frozen=True)
class VersionPolicy:
    """Selects versions, as `model_version_policy` of TensorFlow Serving does.

    Args:
        limit: how many to take at most, the latest ones; None for all.
        only: the numbers that may be taken; None for any.
    """

    limit: int | None = None
    only: frozenset[int] | None = None

    def order(self, numbers: Iterable[int]) -> list[int]:
        """Returns those that may be taken, latest first."""
        return sorted((n for n in numbers if self.only is None or n in self.only), reverse=True)


LATEST = VersionPolicy(limit=1)
ALL = VersionPolicy()


@dataclasses.dataclass(frozen=True)
class Source:
    """A model of a server, and the place where its versions are."""

    model: str
    # A folder of version folders; or, if there is a number, the only version.
    path: pathlib.Path
    number: int | None = None
    policy: VersionPolicy = LATEST
    labels: tuple[tuple[str, int], ...] = ()  # names of versions
    code: pathlib.Path | None = None  # as `ModelVersion.code`
    home: pathlib.Path | None = None  # the folder in which code may appear later


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The versions that a server is to serve."""

    versions: frozenset[ModelVersion]
    labels: Mapping[tuple[str, str], int]  # of a model's name and a label: the version's number
    problems: Mapping[str, str]  # by model: why files that are there are not wanted


def absolute(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path from the root on, without "..". Links stay: they may lead elsewhere later."""
    return pathlib.Path(os.path.abspath(path))  # noqa: PTH100


def version_number(name: str) -> int | None:
    """Returns the number that a folder's name is, or None.

    Digits only, as TensorFlow Serving reads them: leading zeros do not count.
    """
    if not (name.isascii() and name.isdigit()):
        return None
    number = int(name) if len(name) < 1000 else _LARGEST + 1  # Python refuses very long numbers
    return number if number <= _LARGEST else None


def check_model_name(name: str, remedy: str) -> str:
    """Returns a model's name, which is a part of URLs.

    Args:
        remedy: a sentence, for the message.

    Raises:
        InvalidArgumentError: TensorFlow Serving's URLs cannot have such a name.
    """
    if not name or not name.isprintable() or set(name) & {"/", ":"}:
        raise InvalidArgumentError(
            f"The name of a model must be printable text without '/' and ':'. Received: {name!r}. "
            f"{remedy}"
        )
    return name
