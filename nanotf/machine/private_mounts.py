"""Folders and files that a process and its children see at other paths; nobody else does.

A mount namespace of Linux. The superuser makes one; an ordinary user makes a user namespace with
it, in which each process keeps its user and group. Processes, signals, shared memory and cores are
untouched. The kernel drops the mounts with the last process that sees them.

`enter` acts on the calling process, which must have one thread: a child between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from collections.abc import Mapping

# linux/sched.h, linux/mount.h
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 19

_WORKS = "works"

# Loaded here, since a process between fork and exec should not import.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def enter(places: Mapping[str, str]) -> None:
    """Lays folders and files over paths, for this process and those that it starts.

    Args:
        places: for each absolute path, the absolute path of the folder or file that is seen there.
            A folder needs only the folder above, see `_lead`. A file needs a file.

    Raises:
        OSError: The kernel, or its settings, refuse it. The process is of no use any more.
    """
    here = pathlib.Path.cwd()
    _leave_mounts_of_others()
    # Mounts that others make later still arrive here; ours do not go there.
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)
    for path, shown in places.items():
        if pathlib.Path(shown).is_dir():
            _lead(pathlib.Path(path), shown)
        else:
            _mount(shown, path, None, _MS_BIND | _MS_REC)
    os.chdir(here)  # else it stays below what is mounted over it


def try_out(places: Mapping[str, str]) -> str | None:
    """Tries `enter` in a process of its own. For processes with one thread.

    Returns:
        None if it works; else why it does not.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, (why_not(places) or _WORKS).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return None if text == _WORKS else text or "the process that tried it was killed"


def why_not(places: Mapping[str, str]) -> str | None:
    """Enters. Returns None, or the reason that prevents it."""
    try:
        enter(places)
    except OSError as error:
        return str(error)
    return None


def _leave_mounts_of_others() -> None:
    if _libc is None:
        raise OSError("only Linux has mount namespaces")
    if _libc.unshare(_CLONE_NEWNS) == 0:
        return
    # Read before: inside, they are unknown until they are mapped.
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "user namespace")
    # The kernel lets an ordinary user map a group only once `setgroups` is given up.
    for name, text in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (user, user)),
        ("gid_map", b"%d %d 1" % (group, group)),
    ):
        pathlib.Path("/proc/self", name).write_bytes(text)


def _lead(path: pathlib.Path, shown: str) -> None:
    """Makes a path lead to a folder, though the folder above it may be somebody else's.

    A small file system covers the folder above. It shows all else that the folder has, by mounts of
    the very same files, and a link. It is read-only, so that a file which would vanish with it is
    refused instead. A mount of the folder itself would not do: files could not be renamed from the
    one path to the other.
    """
    above = pathlib.Path(os.path.realpath(path.parent))
    # Opened inside the namespace: mounts of another one cannot be mounted again.
    covered = os.open(above, os.O_PATH | os.O_DIRECTORY)
    _mount("tmpfs", str(above), "tmpfs", 0, "mode=755")
    for entry in pathlib.Path(f"/proc/self/fd/{covered}").iterdir():
        seen = above / entry.name
        if entry.name == path.name:
            continue
        if entry.is_symlink():
            seen.symlink_to(entry.readlink())
            continue
        if entry.is_dir():
            seen.mkdir()
        else:
            seen.touch()
        _mount(str(entry), str(seen), None, _MS_BIND | _MS_REC)
    os.close(covered)
    (above / path.name).symlink_to(shown, target_is_directory=True)
    _mount(None, str(above), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    assert _libc is not None
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data) or None)
    _check(result, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
