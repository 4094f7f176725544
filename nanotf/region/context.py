"""The place where code runs: in the user's process, or in a worker inside a `@nano` function.

The public functions work in both, so that a program without `@nano` is one of a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nanotf.compat.versions import require_tensorflow


class Loop(Protocol):
    """Services of a worker while it runs a `@nano` function; see `worker.loop_run`."""

    strategy: Any

    def run_step(
        self, step: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def once(self, what: str, write: Callable[[], Any]) -> Any: ...

    def before_save(self) -> None: ...

    def saved(self, path: str) -> None: ...

    def restored(self, path: str | None) -> None: ...


# The `@nano` function that this process runs as a worker; written by `worker.loop_run` alone.
current: Loop | None = None


def get_strategy() -> Any:
    """The `tf.distribute.Strategy` of this code.

    Returns:
        Inside a `@nano` function with several processes, the worker's
        `tf.distribute.MultiWorkerMirroredStrategy`; elsewhere `tf.distribute.get_strategy()`.
    """
    if current is not None:
        return current.strategy
    return require_tensorflow().distribute.get_strategy()


def rank() -> int:
    """This worker's number inside a `@nano` function, 0 to `size() - 1`; elsewhere 0."""
    return 0 if current is None else int(current.strategy.rank)


def size() -> int:
    """Returns how many workers run this `@nano` function; elsewhere 1."""
    return 1 if current is None else int(current.strategy.size)


def is_chief() -> bool:
    """Returns True if this is the process that writes files and prints: rank 0, or the only one."""
    return rank() == 0
