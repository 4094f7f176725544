"""Unpacks `model.tar.gz`. An archive may come from anybody.

`tarfile`'s filter "data" rejects devices, and names and links that lead out of the folder. It looks
at the links that are already there, and could be led astray by them (CVE-2025-4330, CVE-2025-4517).
So links are made last: no file is ever written through one. Sizes are bounded twice: by what the
members say that they will be, and by what is inflated, which includes headers and padding.
"""

from __future__ import annotations

import gzip
import pathlib
import platform
import shutil
import tarfile
import tempfile
import zlib
from typing import Any

from nanotf.errors import InvalidArgumentError

ENDINGS = (".tar.gz", ".tgz")  # of the names that archives have; any other name is as good
LIMIT = 32 << 30  # bytes that an archive may unpack to
_MEMBERS = 200_000  # files and folders that it may hold
_HEADER = 1 << 20  # bytes of the longest header; longer ones would be held in memory
_GZIP = b"\x1f\x8b"
# A time of modification may be out of range; headers of headers nest; links go round in circles.
_BROKEN = (
    *(tarfile.TarError, zlib.error, EOFError, OSError),
    *(ValueError, OverflowError, RuntimeError),
)


def unpack(archive: pathlib.Path, folder: pathlib.Path, limit: int = LIMIT) -> pathlib.Path:
    """Unpacks an archive into a new folder.

    Args:
        archive: a `.tar.gz`.
        folder: receives the new folder, which nobody else may read.
        limit: in bytes, of what is unpacked.

    Returns:
        The new folder.

    Raises:
        InvalidArgumentError: It is no whole archive, is larger than the limit, or holds something
            else than files and folders, and links between them; or this Python cannot unpack
            archives safely.
    """
    if not hasattr(tarfile, "data_filter"):
        raise InvalidArgumentError(
            "An archive can only be unpacked by a Python whose tarfile has the filter 'data': "
            f"3.10.12, 3.11.4, or later. Received: Python {platform.python_version()}. Update it, "
            "or unpack the archive yourself."
        )
    root = pathlib.Path(tempfile.mkdtemp(prefix="model-", dir=folder))
    try:
        with archive.open("rb") as file:
            if file.read(2) != _GZIP:
                raise tarfile.ReadError("it is not compressed by gzip")
            file.seek(0)
            with gzip.GzipFile(fileobj=file, mode="rb") as inflated:
                _extract(_Bounded(inflated, limit), root, limit)
        _check_links(root)
    except _BROKEN as error:
        shutil.rmtree(root, ignore_errors=True)
        raise InvalidArgumentError(
            f"MODEL, if it is a file, must be saved by Keras, or a whole .tar.gz that can be "
            f"unpacked. Received: {archive} ({type(error).__name__}: {error})."
        ) from None
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return root


class _Bounded:
    """An inflated stream, as `tarfile` reads it."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self._stream = stream
        self._most = limit + 1024 * _MEMBERS + 2 * _HEADER  # with headers and padding

    def read(self, length: int) -> bytes:
        # A header, since the content of files is copied in smaller pieces.
        if length > _HEADER:
            raise tarfile.TarError(f"a header of {length:,} bytes")
        data = self._stream.read(length)
        self._check(self.tell())
        return data

    def seek(self, place: int) -> None:
        # To go back means to inflate again from the beginning; `tarfile` itself goes back a byte.
        if place < self.tell() - tarfile.BLOCKSIZE:
            raise tarfile.TarError("members that are not in order")
        self._check(place)
        self._stream.seek(place)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, place: int) -> None:
        if place > self._most:
            raise tarfile.TarError("more content than its limit")


def _extract(stream: Any, root: pathlib.Path, limit: int) -> None:
    size, hard, symbolic = 0, list[tarfile.TarInfo](), list[tarfile.TarInfo]()
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for count, member in enumerate(tar, 1):
            size += member.size  # of a sparse file, too, all that it will be
            if size > limit or count > _MEMBERS:
                raise tarfile.TarError(f"more than {limit:,} bytes, or {_MEMBERS:,} members")
            _check_name(member.name)
            if member.islnk() or member.issym():
                (hard if member.islnk() else symbolic).append(member)
            else:
                tar.extract(member, root, filter="data")
        while stream.read(_HEADER):  # to the checksum at the end
            pass
        for member in [*hard, *symbolic]:  # in this order no hard link leads through a symbolic one
            _make_link(tar, member, root)


def _check_name(name: str) -> None:
    # The filter would strip a slash, and follow links before it goes up.
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise tarfile.TarError(f"the path {name!r} leads out of it, or upward")


def _make_link(tar: tarfile.TarFile, member: tarfile.TarInfo, root: pathlib.Path) -> None:
    place = root / member.name
    if any(parent.is_symlink() for parent in place.parents if parent.is_relative_to(root)):
        raise tarfile.TarError(f"{member.name!r} lies behind a link")
    if member.islnk():
        _check_name(member.linkname)
        if not (root / member.linkname).is_file():
            raise tarfile.TarError(f"{member.name!r} links to {member.linkname!r}, no file")
    if place.is_symlink() or place.is_file():  # a member of the same name; the later one counts
        place.unlink()
    tar.extract(member, root, filter="data")


def _check_links(root: pathlib.Path) -> None:
    """Rejects links that lead nowhere or out of the folder."""
    real = root.resolve()
    for path in root.rglob("*"):
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(real):
            raise tarfile.TarError(f"the link {str(path.relative_to(root))!r} leads out of it")
