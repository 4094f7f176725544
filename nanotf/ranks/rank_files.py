"""Writes files of a script that runs in all ranks once.

All ranks reach the same line with the same path. Rank 0 writes there. The others do the same in a
folder that is then deleted: values that are summed when they are read, such as moving statistics,
need all ranks. Ranks with different paths, such as those of temporary folders, write each its own.

A callback of Keras asks the file system before it changes it. All ranks get rank 0's answer: one
that asks later may find what rank 0 has made since.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import checkpointing
from nanotf.ranks import this_rank


class _Role(Enum):
    """The part of a rank in what all ranks do with files, at the same line of the script."""

    WRITES = "writes"  # for all ranks
    FOLLOWS = "follows"
    ALONE = "alone"  # works with files of its own


_role: contextvars.ContextVar[_Role | None] = contextvars.ContextVar("nanotf_role", default=None)


@contextmanager
def _as(role: _Role) -> Iterator[None]:
    before = _role.set(role)
    try:
        yield
    finally:
        _role.reset(before)


@contextmanager
def _agreed(path: Any) -> Iterator[None]:
    """Settles this rank's role for what is done to a path in this context. All ranks must enter."""
    role = _Role.WRITES if this_rank.place().rank == 0 else _Role.FOLLOWS
    with _as(role if _is_shared(path) else _Role.ALONE):
        yield
    this_rank.group().barrier(this_rank.FILES_KEY)  # any rank may read the files next


def _is_shared(path: Any) -> bool:
    """Returns True if all ranks name the same file. All ranks must call it."""
    name = os.fspath(pathlib.Path.cwd() / os.fspath(path))  # ranks may have other folders
    # A group gathers numbers only, and Python's `hash` of a text differs between processes.
    return len(set(_gathered(zlib.crc32(name.encode())))) == 1


def _gathered(number: int) -> list[int]:
    """Returns the numbers of all ranks, which must all call it."""
    mine = tf.constant([number], tf.int64)
    found = this_rank.group().all_gather(mine, this_rank.FILES_KEY).numpy().tolist()
    return [int(each) for each in found]


def writing(name: str) -> Callable[[Any, Any], Any]:
    """Makes a function that writes to its argument `name` do so once; see `rank_overrides`."""

    def replacement(stock: Any, _: Any) -> Any:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def write(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            path, role = bound.arguments[name], _role.get()
            # An open file, such as an h5py.File, is this rank's own.
            if role is _Role.ALONE or not isinstance(path, (str, os.PathLike)):
                return stock(*args, **kwargs)
            if role is None:  # the outermost call settles it for those inside
                with _agreed(path):
                    return write(*args, **kwargs)
            if role is _Role.FOLLOWS:
                return _write_aside(stock, bound, name)
            with _as(_Role.ALONE):  # what it calls writes as it does
                return stock(*args, **kwargs)

        return write

    return replacement


def _write_aside(stock: Any, bound: inspect.BoundArguments, name: str) -> Any:
    path, options = os.fspath(bound.arguments[name]), bound.arguments.get("options")
    callbacks = checkpointing.write_callbacks(options)
    if callbacks:  # they get the path that all ranks know
        bound.arguments["options"] = copy.copy(options)
        bound.arguments["options"].experimental_write_callbacks = None
    # As `FOLLOWS`, a function that this one calls would turn aside once more.
    with tempfile.TemporaryDirectory(prefix="nanotf-rank-") as folder, _as(_Role.ALONE):
        # The same name: Keras chooses the format by its suffix.
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
            if _role.get() is None:
                with _agreed(signature.bind(*args, **kwargs).arguments[name]):
                    change(*args, **kwargs)
            elif _role.get() is not _Role.FOLLOWS:
                stock(*args, **kwargs)

        return change

    return replacement


def working_with(attribute: str) -> Callable[[Any, Any], Any]:
    """Makes a method work with the files at its object's `attribute` as one process does.

    It must do so by the functions that `asking`, `leaving` and `opening` replace.
    """

    def replacement(stock: Any, _: Any) -> Any:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def work(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            with _agreed(getattr(self, attribute)):
                if bound.arguments.get("logs"):  # at a batch's end, those of this rank's rows
                    bound.arguments["logs"] = _of_first_rank(bound.arguments["logs"])
                return stock(*bound.args, **bound.kwargs)

        return work

    return replacement


def _of_first_rank(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of rank 0, by which all ranks decide alike what they save, and where."""
    leaves = [np.asarray(leaf, np.float64) for leaf in tf.nest.flatten(logs)]
    mine = tf.constant([np.concatenate([leaf.ravel() for leaf in leaves])])
    found = this_rank.group().all_gather(mine, this_rank.FILES_KEY).numpy()[0]
    parts = np.split(found, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [part.reshape(leaf.shape)[()] for part, leaf in zip(parts, leaves, strict=True)]
    return dict(tf.nest.pack_sequence_as(logs, shaped))


def reading(stock: Any, _: Any) -> Any:
    """Makes a function that reads files, in such a method, do so in each rank by itself."""

    @functools.wraps(stock)
    def read(*args: Any, **kwargs: Any) -> Any:
        with _as(_Role.ALONE):  # Keras copies a remote file to a temporary one first
            return stock(*args, **kwargs)

    return read


def asking(stock: Any, _: Any) -> Any:
    """Makes a question to the file system, in a method that works with files, have one answer."""

    @functools.wraps(stock)
    def ask(path: Any) -> bool:
        if _role.get() not in (_Role.WRITES, _Role.FOLLOWS):
            return bool(stock(path))
        return bool(_gathered(stock(path))[0])

    return ask


def leaving(stock: Any, _: Any) -> Any:
    """Makes a function that changes files leave them, in a method that works with them, to rank 0.

    Ranks need not wait here: they ask, or reach the method's end, before they read.
    """

    @functools.wraps(stock)
    def change(*args: Any, **kwargs: Any) -> None:
        if _role.get() is not _Role.FOLLOWS:
            stock(*args, **kwargs)

    return change


def opening(stock: Any, _: Any) -> Any:
    """Makes files that are opened to be written, in such a method, those of rank 0 alone."""

    @functools.wraps(stock)
    def open_file(path: Any, mode: str = "r") -> Any:
        reads = mode.startswith("r") and "+" not in mode
        return stock(path if reads or _role.get() is not _Role.FOLLOWS else os.devnull, mode)

    return open_file


def logging_rows(stock: Any, _: Any) -> Any:
    """Makes a `CSVLogger` write nothing on ranks other than 0, if all have the same file."""

    @functools.wraps(stock)
    def on_train_begin(self: Any, logs: Any = None) -> Any:
        # `_is_shared` first: all ranks must call it.
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
