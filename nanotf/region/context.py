"""The place where code runs: the user's process, or a `@nano` function in a worker.

The public functions work in both. A program without `@nano` runs in a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nanotf.compat.versions import require_tensorflow


class Loop(Protocol):
    """The interface of a worker while it runs a `@nano` function; see `worker.loop_run`."""

    strategy: Any

    def run_step(
        self, step: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def once(self, what: str, write: Callable[[], Any]) -> Any: ...

    def before_save(self) -> None: ...

    def saved(self, path: str) -> None: ...

    def restored(self, path: str | None) -> None: ...


# The `@nano` function that this process runs as a worker; only `worker.loop_run` writes it.
current: Loop | None = None


def get_strategy() -> Any:
    """Returns the `tf.distribute.Strategy` of this code.

    Returns:
        Inside a `@nano` function with several processes, the worker's
        `tf.distribute.MultiWorkerMirroredStrategy`; elsewhere `tf.distribute.get_strategy()`.
    """
    if current is not None:
        return current.strategy
    return require_tensorflow().distribute.get_strategy()


def rank() -> int:
    """Returns this worker's rank in a `@nano` function, 0 to `size() - 1`; elsewhere 0."""
    return 0 if current is None else int(current.strategy.rank)


def size() -> int:
    """Returns the number of workers that run this `@nano` function; elsewhere 1."""
    return 1 if current is None else int(current.strategy.size)


def is_chief() -> bool:
    """Returns True in the process that writes files and prints: rank 0, or the only one."""
    return rank() == 0
