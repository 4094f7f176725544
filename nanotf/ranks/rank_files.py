"""Writes files of a script that runs in all ranks once.

All ranks reach the same line with the same path. Rank 0 writes there. The others do the same in a
folder that is then deleted: values that are summed when they are read, such as moving statistics,
need all ranks. Ranks with different paths, such as those of temporary folders, write each its own.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import os
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from nanotf.compat import checkpointing
from nanotf.ranks import this_rank

# Set while a function writes: those that it calls write as it does.
_writing: contextvars.ContextVar[bool] = contextvars.ContextVar("nanotf_ranks_writing")


@contextmanager
def _inside() -> Iterator[None]:
    before = _writing.set(True)
    try:
        yield
    finally:
        _writing.reset(before)


def _is_shared(path: Any) -> bool:
    """Returns True if all ranks name the same file. All ranks must call it."""
    name = os.fspath(pathlib.Path.cwd() / os.fspath(path))
    gathered = this_rank.group().all_gather(
        tf.constant([zlib.crc32(name.encode())], tf.int64), this_rank.FILES_KEY
    )
    return len(set(gathered.numpy().tolist())) == 1


def writing(name: str) -> Callable[[Any, Any], Any]:
    """Makes a function that writes to its argument `name` do so once; see `rank_overrides`."""

    def replacement(stock: Any, _: Any) -> Any:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def write(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            path = bound.arguments[name]
            if _writing.get(False) or not isinstance(path, (str, os.PathLike)):
                return stock(*args, **kwargs)
            shared = _is_shared(path)
            with _inside():
                if not shared or this_rank.place().rank == 0:
                    result = stock(*args, **kwargs)
                else:
                    result = _write_aside(stock, bound, name)
            this_rank.group().barrier(this_rank.FILES_KEY)  # any rank may read the file next
            return result

        return write

    return replacement


def _write_aside(stock: Any, bound: inspect.BoundArguments, name: str) -> Any:
    path, options = os.fspath(bound.arguments[name]), bound.arguments.get("options")
    callbacks = checkpointing.write_callbacks(options)
    if callbacks:  # they get the path that all ranks know
        bound.arguments["options"] = copy.copy(options)
        bound.arguments["options"].experimental_write_callbacks = None
    with tempfile.TemporaryDirectory(prefix="nanotf-rank-") as folder:
        aside = os.fspath(pathlib.Path(folder) / pathlib.PurePath(path).name)
        bound.arguments[name] = aside
        result = stock(*bound.args, **bound.kwargs)
    written = path + result[len(aside) :] if str(result).startswith(aside) else result
    for callback in callbacks:
        callback(written)
    return written


def changing(name: str) -> Callable[[Any, Any], Any]:
    """Makes a function that changes the file `name` and returns nothing do so once."""

    def replacement(stock: Any, _: Any) -> Any:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def change(*args: Any, **kwargs: Any) -> None:
            path = signature.bind(*args, **kwargs).arguments[name]
            if not _is_shared(path) or this_rank.place().rank == 0:
                stock(*args, **kwargs)

        return change

    return replacement


def logging_rows(stock: Any, _: Any) -> Any:
    """Makes a `CSVLogger` write nothing on ranks other than 0, if all have the same file."""

    @functools.wraps(stock)
    def on_train_begin(self: Any, logs: Any = None) -> Any:
        if _is_shared(self.filename) and this_rank.place().rank:
            self.filename = os.devnull
        return stock(self, logs)

    return on_train_begin


def making_writers(stock: Any, _: Any) -> Any:
    """Makes a summary writer write nothing on ranks other than 0."""

    @functools.wraps(stock)
    def create_file_writer(*args: Any, **kwargs: Any) -> Any:
        if this_rank.place().rank:
            return tf.summary.create_noop_writer()
        return stock(*args, **kwargs)

    return create_file_writer
