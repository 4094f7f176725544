"""Limits of this process's control groups: cpusets, CPU quota, memory; cgroup v1 and v2.

The limits of every ancestor count, too: a container's own group is often unlimited, while its
pod's group is not.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a process's control groups."""

    cpuset: frozenset[int] | None = None  # the logical CPUs allowed; None for no limit
    # CPU time per time (3.5 is three and a half CPUs); None for no limit.
    quota: float | None = None
    memory: int | None = None  # bytes; None for no limit


@dataclass(frozen=True)
class _Mount:
    """One mounted cgroup hierarchy: its part `root` is mounted at `point`."""

    controllers: frozenset[str]  # empty for cgroup v2, which has all of them in one hierarchy
    root: str
    point: str


def read_text(path: pathlib.Path) -> str | None:
    """Reads a small file's text without surrounding space. Returns None if that fails."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Returns the numbers of a kernel CPU list such as `0-3,8,10-11`.

    Raises:
        ValueError: The text is not such a list.
    """
    numbers: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def read_cpu_list(path: pathlib.Path) -> frozenset[int] | None:
    """Returns the numbers of a file's CPU list; None if it is missing, empty or unreadable."""
    try:
        return parse_cpu_list(read_text(path) or "") or None
    except ValueError:
        return None


def read_limits(root: pathlib.Path) -> Limits:
    """Reads the limits of this process's control groups and of their ancestors.

    Args:
        root: the directory that holds `proc` and `sys`; `/` except in tests.

    Returns:
        The intersection of the cpusets, and the smallest of each other limit.
    """
    mounts = _mounts(root)
    cpuset: frozenset[int] | None = None
    quotas: list[float] = []
    memory: list[int] = []
    for controllers, path in _memberships(root):
        for directory in _own_and_ancestors(root, mounts, controllers, path):
            allowed = _cpuset(directory)
            if allowed is not None:
                cpuset = allowed if cpuset is None else cpuset & allowed
            quota = _quota(directory)
            if quota is not None:
                quotas.append(quota)
            memory += _memory(directory)
    return Limits(cpuset, min(quotas, default=None), min(memory, default=None))


def memory_kills(root: pathlib.Path) -> int | None:
    """Returns how many processes of this control group the kernel has ended for lack of memory.

    Args:
        root: as for `read_limits`.

    Returns:
        None if neither the group nor an ancestor counts them.
    """
    mounts = _mounts(root)
    for controllers, path in _memberships(root):
        for directory in _own_and_ancestors(root, mounts, controllers, path):
            for name in ("memory.events", "memory.oom_control"):  # v2; v1 since Linux 4.13
                text = read_text(directory / name) or ""
                found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
                if found:
                    return int(found[1])
    return None


def _memberships(root: pathlib.Path) -> Iterator[tuple[frozenset[str], str]]:
    """Yields the lines `hierarchy:controllers:path` of /proc/self/cgroup for CPUs and memory."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = frozenset(filter(None, names.split(",")))
        if not controllers or controllers & {"cpu", "cpuset", "memory"}:
            yield controllers, path


def _mounts(root: pathlib.Path) -> list[_Mount]:
    """Reads the cgroup mounts of /proc/self/mountinfo (see `man 5 proc_pid_mountinfo`)."""
    mounts = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = kind[2].split(",") if kind[0] == "cgroup" else []
        mounts.append(_Mount(frozenset(controllers), _unescape(fields[3]), _unescape(fields[4])))
    # Where mountinfo lists none or cannot be read, the usual places are tried.
    return mounts or [
        _Mount(frozenset(), "/", "/sys/fs/cgroup"),
        _Mount(frozenset({"cpu"}), "/", "/sys/fs/cgroup/cpu"),
        _Mount(frozenset({"cpuset"}), "/", "/sys/fs/cgroup/cpuset"),
        _Mount(frozenset({"memory"}), "/", "/sys/fs/cgroup/memory"),
    ]


def _unescape(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _own_and_ancestors(
    root: pathlib.Path, mounts: list[_Mount], controllers: frozenset[str], path: str
) -> Iterator[pathlib.Path]:
    """Yields the group's directory and its ancestors, up to the mount point."""
    for mount in mounts:
        fits = mount.controllers & controllers if controllers else not mount.controllers
        if not fits:
            continue
        point = root / mount.point.lstrip("/")
        directory = point / _below(path, mount.root)
        # A container without a cgroup namespace reads the host's path and sees its own group
        # at the mount point. A container that was moved reads `/../x`. Both end at the mount point.
        if not directory.is_dir():
            directory = point
        yield directory
        while directory != point:
            directory = directory.parent
            yield directory


def _below(path: str, mount_root: str) -> str:
    parts = pathlib.PurePosixPath(path).parts[1:]
    above = pathlib.PurePosixPath(mount_root).parts[1:]
    if ".." in parts or parts[: len(above)] != above:
        return ""
    return "/".join(parts[len(above) :])


def _cpuset(directory: pathlib.Path) -> frozenset[int] | None:
    # The kernel enforces the effective set; the plain one may be empty (inherited).
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        allowed = read_cpu_list(directory / name)
        if allowed is not None:
            return allowed
    return None


def _quota(directory: pathlib.Path) -> float | None:
    both = read_text(directory / "cpu.max")  # v2: "350000 100000", or "max 100000"
    if both is not None:
        quota, _, period = both.partition(" ")
    else:
        quota = read_text(directory / "cpu.cfs_quota_us") or ""  # v1: -1 for no limit
        period = read_text(directory / "cpu.cfs_period_us") or ""
    try:
        microseconds, per = int(quota), int(period)
    except ValueError:
        return None
    return microseconds / per if microseconds > 0 and per > 0 else None


def _memory(directory: pathlib.Path) -> list[int]:
    """Reads a group's memory limits. No limit is "max" in v2, and a number above 2^60 in v1."""
    texts = [read_text(directory / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return [int(text) for text in texts if text and text.isdigit() and int(text) < 1 << 60]
