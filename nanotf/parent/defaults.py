"""Defaults of `nanotf run -n N` for a `fit` that does not set the number of processes."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, check_choice

# "float32" leaves Keras's global dtype policy as it is; "mixed_bfloat16" computes in bfloat16 and
# keeps variables in float32.
PRECISIONS = ("float32", "mixed_bfloat16")
# What `tune` may name: settings that "auto" tries beside the number of processes.
TUNE = ("jit_compile", "bf16")


@dataclass
class RunDefault:
    """The default of a run."""

    processes: int | str | None  # or `AUTO`; None for no default
    check: Callable[[], None] = lambda: None  # the first `fit` calls it; what it raises, `fit` does
    fits: int = 0  # how often `fit` was called
    tune: tuple[str, ...] = ()  # what a `fit` tries that does not name any setting
    used: bool = False  # whether workers have run anything, such as a `@nano` function


# Set by `cli.run`, before the script starts; None in every other process.
current: RunDefault | None = None

# Whether all code runs in this process, whatever it asks for; `cli.recorded` sets it.
alone = False

# Of a context: another thread of the user's may call `fit` at the same time.
_is_ours = contextvars.ContextVar("_is_ours", default=False)


def note_use() -> None:
    """Notes that workers run something."""
    if current is not None:
        current.used = True


@contextlib.contextmanager
def no_default() -> Iterator[None]:
    """Marks each `fit` in this context as nanotf's own, of a copy of the user's model."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def num_processes(given: int | str | None) -> int | str | None:
    """Returns the number of processes of a call of `fit`.

    Args:
        given: int, "auto" or None, the argument of the call.

    Returns:
        `given`, or the default if it is None. There is no default inside another order: a callback
        that trains its own model does so in this process, as it would without `nanotf run`, since
        the workers are waiting for it.
    """
    if alone:
        return None
    if current is None or _is_ours.get():
        return given
    current.fits += 1
    if current.fits == 1:
        current.check()
    if given is not None:
        return given
    from nanotf.pool import warm  # imports NumPy, which the command line avoids

    return None if warm.lent_to() == threading.get_ident() else current.processes


def tune(given: Any, processes: int | str | None) -> tuple[str, ...]:
    """Checks the argument `tune` of `fit`.

    Args:
        given: None for the default of the run, or a sequence of names of `TUNE`.
        processes: int, "auto" or None, the number of processes of the call.

    Returns:
        tuple of str, the settings to try, each once.

    Raises:
        InvalidArgumentTypeError: It is no sequence of str.
        InvalidArgumentError: It has an unknown name, or the number is not "auto".
    """
    if given is None:
        return current.tune if current is not None and processes == "auto" else ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgumentTypeError(
            f"`tune` must be a sequence of names. Received: tune={given!r}. Pass some of {TUNE}, "
            'for instance tune=("bf16",).'
        )
    names = tuple(dict.fromkeys(given))
    for name in names:
        if name not in TUNE:
            raise InvalidArgumentError(
                f"`tune` names settings to try: {', '.join(map(repr, TUNE))}. Received: {name!r} "
                f"in tune={given!r}. Remove it."
            )
    if names and processes != "auto":
        raise InvalidArgumentError(
            '`tune` needs num_processes="auto", which measures. Received: '
            f'tune={given!r} and num_processes={processes!r}. Pass num_processes="auto".'
        )
    return names


def check_precision(precision: Any) -> str:
    """Returns the argument `precision` if it is valid.

    Raises:
        InvalidArgumentError: There is no such precision.
    """
    check_choice("precision", precision, PRECISIONS)
    return str(precision)
