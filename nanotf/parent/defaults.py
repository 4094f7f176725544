"""Defaults of `nanotf run -n N` for a `fit` that does not set the number of processes."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nanotf.errors import check_choice

# "float32" leaves Keras's global dtype policy as it is; "mixed_bfloat16" computes in bfloat16 and
# keeps variables in float32.
PRECISIONS = ("float32", "mixed_bfloat16")


@dataclass
class RunDefault:
    """The default of a run.

    Args:
        processes: int, `AUTO`, or None for no default.
        check: callable that the first `fit` calls; its exceptions pass through `fit`.
        fits: int, how often `fit` was called.
    """

    processes: int | str | None
    check: Callable[[], None] = lambda: None
    fits: int = 0


# Set by `cli.run`, before the script starts; None in every other process.
current: RunDefault | None = None

_is_ours = contextvars.ContextVar("_is_ours", default=False)


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
        `given`, or the default if it is None. There is no default inside another job: a callback
        that trains its own model does so in this process, as it would without `nanotf run`, since
        the workers are waiting for it.
    """
    if current is None or _is_ours.get():
        return given
    current.fits += 1
    if current.fits == 1:
        current.check()
    if given is not None:
        return given
    from nanotf.pool import warm  # imports NumPy, which the command line avoids

    return None if warm.lent_to() == threading.get_ident() else current.processes


def check_precision(precision: Any) -> str:
    """Returns the argument `precision` if it is valid.

    Raises:
        InvalidArgumentError: There is no such precision.
    """
    check_choice("precision", precision, PRECISIONS)
    return str(precision)
