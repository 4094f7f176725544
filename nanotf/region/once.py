"""Writes files of a divided program once: rank 0 writes while the others wait.

All workers reach the same line. When rank 0 has finished, the others take its result and continue
as if they had written it: every rank advances counters and drops old checkpoints.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from nanotf.compat import checkpointing
from nanotf.compat.versions import require_tensorflow
from nanotf.region import context


def _is_apart() -> bool:
    """Returns True in a worker whose files rank 0 writes."""
    return context.current is not None and not context.is_chief()


def writing(name: str) -> Callable[[Any, Any], Any]:
    """Makes a function that writes to its argument `name` do so on rank 0; see `overrides`."""

    def replacement(stock: Any, _: Any) -> Any:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def write(*args: Any, **kwargs: Any) -> Any:
            if context.current is None:
                return stock(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            path = given[name]
            is_path = isinstance(path, (str, os.PathLike))
            # Other ranks wait for the news of a write of this name.
            what = f"{stock.__qualname__} {os.fspath(path) if is_path else type(path).__name__}"
            written = context.current.once(what, lambda: stock(*args, **kwargs))
            if _is_apart():
                for callback in checkpointing.write_callbacks(given.get("options")):
                    callback(written)
            return written

        return write

    return replacement


def leaving_files_alone(stock: Any, _: Any) -> Any:
    """Makes a function that changes files and returns nothing a no-op on other ranks."""

    @functools.wraps(stock)
    def change(*args: Any, **kwargs: Any) -> None:
        if not _is_apart():
            stock(*args, **kwargs)

    return change


def making_writers(stock: Any, _: Any) -> Any:
    """Makes a summary writer write nothing on other ranks."""

    @functools.wraps(stock)
    def create_file_writer(*args: Any, **kwargs: Any) -> Any:
        if _is_apart():
            return require_tensorflow().summary.create_noop_writer()
        return stock(*args, **kwargs)

    return create_file_writer
