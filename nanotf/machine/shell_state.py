"""The changes that `nanotf-init` made to a shell, recorded in the variable `NANOTF_ENV`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nanotf.machine.installed import ALLOCATORS

STATE_VARIABLE = "NANOTF_ENV"
ALLOCATOR_CHOICES = ("auto", *ALLOCATORS, "none")


@dataclass(frozen=True)
class Options:
    """The options that the user gave to `nanotf-init`."""

    openmp: bool = True  # False sets no `OMP_*`/`KMP_*` and preloads no libiomp5
    # One of `ALLOCATOR_CHOICES`; "auto" is tcmalloc if it is installed, the only allocator that
    # measurably helped.
    allocator: str = "auto"
    onednn: bool = True
    perf: bool = False  # see `environment.PERF_HELP`
    cores: int | None = None  # None for all usable cores


@dataclass(frozen=True)
class ShellState:
    """The changes that `nanotf-init` made to the shell, as recorded in `NANOTF_ENV`."""

    options: Options
    values: dict[str, str]  # the exported variables
    before: dict[str, str | None]  # their previous values; None for unset

    def dump(self) -> str:
        """Returns the value of `NANOTF_ENV`: plain ASCII, whatever bytes the old values have."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_state(environ: Mapping[str, str]) -> ShellState | None:
    """Reads the changes of `nanotf-init` to this environment; None if there is no valid record."""
    try:
        found = json.loads(environ.get(STATE_VARIABLE, ""))
        state = ShellState(Options(**found["options"]), found["values"], found["before"])
        texts = [*state.values.values(), *(v for v in state.before.values() if v is not None)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    sound = (
        set(state.before) == set(state.values)
        and all(isinstance(text, str) for text in texts)
        # The names reach a shell's `eval`.
        and all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in state.before)
        and state.options.allocator in ALLOCATOR_CHOICES
        and isinstance(state.options.cores, int | None)
    )
    return state if sound else None


def user_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables that `nanotf-init` exported.

    A variable that no longer has its value from `nanotf-init` is the user's.
    """
    state = read_state(environ)
    mine = dict(environ)
    mine.pop(STATE_VARIABLE, None)
    for name, value in state.values.items() if state else ():
        if mine.get(name) != value:
            continue
        before = state.before[name] if state else None
        if before is None:
            del mine[name]
        else:
            mine[name] = before
    return mine


def cores_cap(environ: Mapping[str, str]) -> int | None:
    """Returns the number of cores that the user lets nanotf use in all; None for no cap.

    Reads `OMP_NUM_THREADS`, if the user set it, and the option of `nanotf-init --cores`.
    """
    state = read_state(environ)
    caps = [thread_count(user_environ(environ).get("OMP_NUM_THREADS"))]
    caps.append(state.options.cores if state else None)
    return min((cap for cap in caps if cap), default=None)


def thread_count(text: str | None) -> int | None:
    """Parses a thread count. `OMP_NUM_THREADS=4,2` means 4 threads that may start 2 each."""
    found = re.fullmatch(r"\s*([0-9]+)\s*(,.*)?", text or "")
    return (int(found[1]) or None) if found else None
