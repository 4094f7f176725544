"""Tracebacks with the user's frames, without those of the packages beneath."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

VARIABLE = "NANOTF_TRACEBACK"  # "full": errors have all frames, workers' tracebacks and logs
_OWN = pathlib.Path(__file__).parent
_BENEATH = ("tensorflow", "keras", "tf_keras")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def shows_whole() -> bool:
    """Returns True if NANOTF_TRACEBACK is "full"."""
    return os.environ.get(VARIABLE) == "full"


def raising_at_the_call(function: _Function) -> _Function:
    """Decorates a function that users call: its tracebacks have the frames of the user's code.

    They end at the user's call, or in code of the user's that was called from there, as a callback.
    In a worker they are whole: `WorkerError.remote_traceback` has them.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if shows_whole() or "NANOTF_RANK" in os.environ:
                raise
            raise error.with_traceback(_of_users(error.__traceback__))  # noqa: B904

    return cast("_Function", call)


def _of_users(found: types.TracebackType | None) -> types.TracebackType | None:
    entries = []
    while found is not None:  # no recursion: a `RecursionError` has thousands
        entries.append(found)
        found = found.tb_next
    filters, made = _filters(), None
    for entry in reversed(entries):
        filename = entry.tb_frame.f_code.co_filename
        if not (is_nanotfs(filename) or (filters and is_beneath(filename))):
            line = -1 if entry.tb_lineno is None else entry.tb_lineno  # a frame without lines
            made = types.TracebackType(made, entry.tb_frame, entry.tb_lasti, line)
    return made


def _filters() -> bool:
    """Returns True unless the user wants TensorFlow's frames."""
    debugging = getattr(sys.modules.get("tensorflow"), "debugging", None)  # while it is imported
    return debugging is None or bool(debugging.is_traceback_filtering_enabled())


def is_nanotfs(filename: str) -> bool:
    """Returns True for a file of this package."""
    return pathlib.Path(filename).is_relative_to(_OWN)


def is_beneath(filename: str) -> bool:
    """Returns True for a file of TensorFlow or Keras."""
    path = pathlib.Path(filename)
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _BENEATH]
    return any(path.is_relative_to(pathlib.Path(f).parent) for f in files if f is not None)
