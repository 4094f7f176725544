"""Cache file of the trials' measurements, see `auto`.

The file is `nanotf/tuning.json` in the user's cache directory: `$XDG_CACHE_HOME`, or `~/.cache`.
It maps a hash of model, data, machine and versions to measurements. A process that reads while
another one writes finds the whole old or the whole new file. Two writers write in turn.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.console import logger
from nanotf.errors import NanoError
from nanotf.machine import user_cache
from nanotf.machine.user_cache import NoHomeError
from nanotf.wire import files

VERSION = 4  # of the file; other versions are ignored
_OPTIONAL = {
    "start_up": 0.0,
    "note": "",
    "stopped": 0.0,
    "setting": "",
    "losses": (),
}  # fields of `timed_fits.Measured`, with their defaults
_LONGEST = 1e9  # seconds; more is not a time, and neither is infinity


def path() -> pathlib.Path:
    """Returns the file's path.

    Raises:
        NoHomeError: As `user_cache.folder`.
    """
    return user_cache.folder() / "tuning.json"


def entries() -> dict[str, Any]:
    """Returns all entries; {} if the file is missing or not nanotf's.

    Skips entries that `remember` cannot have written. They are lost when it writes again.
    """
    try:
        found = files.read_json(path())
        with files.doubting(path()):
            if found["version"] != VERSION:
                return {}
            written = dict(found["entries"])
    except (FileNotFoundError, NoHomeError):
        return {}
    except (OSError, files.Damaged) as error:
        logger.warning("%s cannot be read, and is not used: %s", path(), error)
        return {}
    good = {key: entry for key, entry in written.items() if _is_entry(entry)}
    if len(good) < len(written):
        logger.warning(
            "%d of %d entries of %s cannot be read, and are not used.",
            len(written) - len(good),
            len(written),
            path(),
        )
    return good


def _is_entry(entry: Any) -> bool:
    """Returns True if `auto` and `nanotf tune` can use an entry."""
    return (
        isinstance(entry, dict)
        and entry.keys() == {"measured", "date", "model"}
        and isinstance(entry["date"], str)
        and isinstance(entry["model"], str)
        and isinstance(entry["measured"], list)
        and all(map(_is_measured, entry["measured"]))
        and decides(entry["measured"])
    )


def decides(measured: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if one process was measured, or the model without any setting of `tune`.

    The times of others decide nothing without it.

    Args:
        measured: for each trial the fields of its `timed_fits.Measured`.
    """
    steps = [m for m in measured if m["step"] is not None]
    if any(m.get("setting") for m in steps):
        return any(not m.get("setting") for m in steps)
    return any(m["num_processes"] == 1 for m in steps)


def _is_measured(value: Any) -> bool:
    """Returns True if a value has the fields of a `timed_fits.Measured`."""
    if not isinstance(value, dict) or not value.keys() >= {"num_processes", "step"}:
        return False
    number, step, rest = value["num_processes"], value["step"], {**_OPTIONAL, **value}
    return (
        rest.keys() == {"num_processes", "step", *_OPTIONAL}
        and isinstance(number, int)
        and not isinstance(number, bool)  # JSON's true, which Python takes for 1
        and number >= 1
        and (step is None or _is_time(step))
        and _is_time(rest["start_up"])
        and _is_time(rest["stopped"])
        and isinstance(rest["note"], str)
        and isinstance(rest["setting"], str)
        and isinstance(rest["losses"], (list, tuple))
        and all(isinstance(loss, float) for loss in rest["losses"])
    )


def _is_time(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < _LONGEST  # False for NaN


def remember_now(key: str, measured: Sequence[Mapping[str, Any]], model: str) -> None:
    """Adds what was measured now, if it decides something.

    Args:
        model: its name, for people.
    """
    if decides(measured):
        date = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        remember(key, {"measured": list(measured), "date": date, "model": model})


def remember(key: str, entry: dict[str, Any]) -> None:
    """Adds an entry; only logs a warning if the file cannot be written."""
    try:
        target = path()
    except NoHomeError as error:
        logger.warning("Measurements cannot be remembered. %s", error)
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.Lock(target.with_suffix(".lock"), waits=True):  # nobody's entry is lost
            whole = {"version": VERSION, "entries": {**entries(), key: entry}}
            files.write_json(target, whole, indent=1)
    except OSError as error:
        logger.warning("Measurements cannot be remembered in %s: %s", target, error)


def clear() -> int:
    """Removes the file; returns how many entries it had.

    Raises:
        NanoError: The file cannot be removed, or the user has no home directory.
    """
    count = len(entries())
    try:
        path().unlink(missing_ok=True)
    except OSError as error:
        raise NanoError(
            f"The file of measurements must be removable. Received: {path()}, {error.strerror}. "
            "Remove it by hand."
        ) from error
    return count
