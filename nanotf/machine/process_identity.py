"""The identity of a process: its id is used again, so it counts with its start."""

from __future__ import annotations

import pathlib

import psutil

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def start_of(pid: int) -> str | None:
    """Returns what tells a process from others with its id; None if it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if not psutil.LINUX:
            return f"{process.create_time():.2f}"
        # Exact, and steady when the clock is set, unlike create_time().
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything. Field 22 is the start in clock ticks.
    return f"{_boot()}:{status.rpartition(')')[2].split()[19]}"


def _boot() -> str:
    """Returns an id of the system's run, since whose begin the ticks count."""
    try:
        return pathlib.Path(_BOOT_ID).read_text().strip()
    except OSError:
        return ""  # some sandboxes have none; ids and ticks then differ until the next reboot
