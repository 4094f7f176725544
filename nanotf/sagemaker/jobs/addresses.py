"""Addresses of data and results: plain paths, `file://`, and others through fsspec.

fsspec comes with the extra `nanotf[remote]`; each kind of storage also needs its own package
(`s3fs` for `s3://`, `gcsfs` for `gs://`). Paths and `file://` need neither.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import shutil
import urllib.parse
from typing import Any

from nanotf.errors import InvalidArgumentError

# RFC 3986, 3.1. A plain path may hold a colon, so both slashes count.
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def local_path(address: str) -> pathlib.Path | None:
    """Returns the absolute path of a plain path or a `file://` address; None for others."""
    scheme = _SCHEME.match(address)
    if scheme is None:
        return pathlib.Path(os.path.abspath(pathlib.Path(address).expanduser()))  # noqa: PTH100 - keeps links
    if scheme[1].lower() != "file":
        return None
    parsed = urllib.parse.urlparse(address)
    # In file://data/train, `data` is a host.
    if parsed.netloc not in ("", "localhost"):
        raise InvalidArgumentError(
            f"A file:// address must hold an absolute path: file:///folder. Received: {address}."
        )
    return pathlib.Path(urllib.parse.unquote(parsed.path))  # as `Path.as_uri` writes it


def check(address: str) -> None:
    """Rejects an address that cannot be read here: a missing path, or a package not installed.

    Raises:
        InvalidArgumentError: as above. Nothing is sent to remote storage, so data that are missing
            there are found only by `download`.
    """
    path = local_path(address)
    if path is None:
        _file_system_class(address)
    elif not path.exists():
        raise InvalidArgumentError(
            f"The data must exist. Received: {address} (no such file or folder: {path})."
        )


def _file_system_class(address: str) -> Any:
    scheme = address.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise InvalidArgumentError(
            f"Addresses other than paths and file:// are read through fsspec. Received: {address} "
            f"({error}). Install nanotf[remote] and the package of the storage, for instance "
            "s3fs for s3:// or gcsfs for gs://."
        ) from None
    except ValueError:
        raise InvalidArgumentError(
            f"No storage of this kind is known. Received: {address}. Use a path, file://, or a "
            "scheme of fsspec such as s3:// and gs://."
        ) from None


def download(address: str, folder: pathlib.Path) -> None:
    """Copies a remote folder's content, a file, or the files of a prefix into a new local folder.

    A prefix is an address such as `s3://bucket/data/part`, where nothing is but the files
    `data/part-0` and `data/part-1`, as SageMaker's S3Prefix.

    Args:
        address: not a local one.
        folder: appears when it is whole.
    """
    system, path = _open(address)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a try on a full disk
    part.mkdir(parents=True)
    try:
        _fetch(system, path, part, address)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _fetch(system: Any, path: str, folder: pathlib.Path, address: str) -> None:
    if system.isdir(path):
        # fsspec: only with a slash at its end, a folder's content is copied, not the folder itself.
        system.get(f"{path.rstrip('/')}/", f"{folder}/", recursive=True)
        return
    parent = path.rstrip("/").rpartition("/")[0]
    found = [path] if system.exists(path) else _with_prefix(system, parent, path)
    if not found:
        raise InvalidArgumentError(f"The data must exist. Received: {address} (nothing is there).")
    for file in found:
        place = folder / file[len(parent) :].strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        system.get_file(file, str(place))


def _with_prefix(system: Any, parent: str, prefix: str) -> list[str]:
    """Returns the files whose path begins with a prefix."""
    if prefix.endswith("/") or not parent:  # a folder or a bucket, neither of them a prefix
        return []
    # Object storage lists by prefix; of a large bucket, nothing else may be listed.
    knows_prefixes = "prefix" in inspect.signature(system.find).parameters
    options = {"prefix": prefix[len(parent) :].lstrip("/")} if knows_prefixes else {}
    try:
        return [file for file in system.find(parent, **options) if file.startswith(prefix)]
    except FileNotFoundError:
        return []


def exists(address: str) -> bool:
    """Returns True if something is at a remote address."""
    system, path = _open(address)
    return bool(system.exists(path))


def upload(file: pathlib.Path, address: str) -> None:
    """Copies a file, or a folder's content, to a remote address.

    Only writes files, where that is enough: who may write to a storage need not be allowed to list
    it.
    """
    system, path = _open(address)
    if not file.is_dir():
        _put(system, file, path)
        return
    for folder, _, names in os.walk(file):
        for name in sorted(names):
            each = pathlib.Path(folder, name)
            _put(system, each, f"{path.rstrip('/')}/{each.relative_to(file).as_posix()}")


def _put(system: Any, file: pathlib.Path, path: str) -> None:
    try:
        system.put_file(str(file), path)
    except FileNotFoundError:
        # Object storage has no folders, but a file system behind fsspec needs the parent. A bucket
        # that does not exist is a mistake.
        if not system.exists(path.partition("/")[0] or "/"):
            raise
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        system.put_file(str(file), path)


def _open(address: str) -> tuple[Any, str]:
    _file_system_class(address)
    fsspec = importlib.import_module("fsspec")
    system, path = fsspec.core.url_to_fs(address)
    return system, path


def join(address: str, *parts: str) -> str:
    """Appends parts to an address."""
    return "/".join([address.rstrip("/"), *parts])
