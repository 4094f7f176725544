"""The rule of `num_processes="auto"`: measuring costs a tenth of what it can save, at most.

One process is never measured by a trial: the call itself trains in one process, and its own steps,
whose results count, are timed. Then the time that is left is known:

    left    = steps left * seconds of a step in one process
    can save = left * (1 - 1 / n)      n workers are n times as fast as one process, at best
    allowed = can save / 10

Workers are tried if starting them (unless they are warm), tracing a step and running a second of
steps is expected to take no longer than `allowed`, and are stopped when `allowed` is over.
"""

from __future__ import annotations

import math

from nanotf.pool import starts

SHARE = 0.1  # of what can be saved
WORTH = 0.97  # workers must take less than this share of one process's time
START_UP = 5.0  # seconds, until a start of workers was timed


def can_save(left: float, number: int) -> float:
    """Returns the seconds that workers can save, at best, of a training in one process.

    Args:
        left: seconds that the rest of the training takes in one process.
        number: of workers, the largest that may be chosen.
    """
    return left * (1 - 1 / number)


def allowed(saving: float) -> float:
    """Returns the seconds that measuring may take to save `saving` seconds at best."""
    return SHARE * saving


def start_up() -> float:
    """Returns the seconds in which workers start if none are warm."""
    return starts.last_seconds(starts.TENSORFLOW) or START_UP


def pays_from(start_up: float, one: float, several: float) -> int | None:
    """Returns from how many steps on workers end first, their start included.

    Args:
        start_up: seconds until the workers are ready.
        one, several: seconds of a step in one process, and with the workers.

    Returns:
        int, or None if they never do.
    """
    saved = WORTH * one - several
    return math.floor(start_up / saved) + 1 if saved > 0 else None


def in_epochs(steps: int, each: int | None) -> str:
    """Writes a number of steps for people, in epochs if their steps are known.

    Args:
        each: the steps of an epoch.
    """
    number, unit = (steps, "step") if not each else (math.ceil(steps / each), "epoch")
    return f"{number} {unit}{'s' if number != 1 else ''}"
