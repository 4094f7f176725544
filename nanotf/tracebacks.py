"""Tracebacks with the user's frames, without those of the packages beneath."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

VARIABLE = "NANOTF_TRACEBACK"  # "full": errors have all frames, workers' tracebacks and logs
_OWN = pathlib.Path(__file__).parent
_BENEATH = ("tensorflow", "keras", "tf_keras", "cloudpickle", "optuna")  # nanotf calls them
_STANDARD = pathlib.Path(sysconfig.get_path("stdlib"))
_SITES = ("site-packages", "dist-packages")  # folders in it that are not Python's

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass
class _ThisProcess:
    """The kind of this process, which decides how it shows errors."""

    is_worker: bool = False  # `enter_worker` sets it


_here = _ThisProcess()


def enter_worker() -> None:
    """Keeps tracebacks whole in this process from now on: it is a worker.

    Its errors bring them to the parent, in `WorkerError.remote_traceback`.
    """
    _here.is_worker = True


def shows_whole() -> bool:
    """Returns True if NANOTF_TRACEBACK is "full"."""
    return os.environ.get(VARIABLE) == "full"


def raising_at_the_call(function: _Function) -> _Function:
    """Decorates a function that users call: its tracebacks have the frames of the user's code.

    They end at the user's call, or in code of the user's that was called from there, as a callback.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not _here.is_worker and not shows_whole():
                for each in _chain(error):
                    each.__traceback__ = of_users(each.__traceback__)
                if sys.version_info < (3, 11):  # a bare `raise` would bring all frames back
                    raise error.with_traceback(error.__traceback__)  # noqa: B904
            raise  # adds no frame

    return cast("_Function", call)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that Python prints above it."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def of_users(found: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of nanotf and of what it calls.

    A frame of Python's own library stays if the user's code has called it.
    """
    entries, shown = [], True
    while found is not None:  # no recursion: a `RecursionError` has thousands
        filename = found.tb_frame.f_code.co_filename
        shown = shown if is_standard(filename) else not is_library(filename)
        if shown:
            entries.append(found)
        found = found.tb_next
    made = None
    for entry in reversed(entries):
        line = -1 if entry.tb_lineno is None else entry.tb_lineno  # a frame without lines
        made = types.TracebackType(made, entry.tb_frame, entry.tb_lasti, line)
    return made


def is_library(filename: str) -> bool:
    """Returns True for a file of nanotf or beneath, unless TensorFlow shows its own frames."""
    return is_nanotfs(filename) or (_filters() and is_beneath(filename))


def _filters() -> bool:
    """Returns True unless the user wants TensorFlow's frames."""
    debugging = getattr(sys.modules.get("tensorflow"), "debugging", None)  # while it is imported
    return debugging is None or bool(debugging.is_traceback_filtering_enabled())


def is_nanotfs(filename: str) -> bool:
    """Returns True for a file of this package."""
    return pathlib.Path(filename).is_relative_to(_OWN)


def is_beneath(filename: str) -> bool:
    """Returns True for a file of a package that nanotf calls."""
    path = pathlib.Path(filename)
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _BENEATH]
    return any(path.is_relative_to(pathlib.Path(f).parent) for f in files if f is not None)


def is_standard(filename: str) -> bool:
    """Returns True for a file of Python's own library, and for its frozen or built-in code."""
    if filename.startswith("<"):  # such a name may also be of code without a file, of the user's
        return filename.startswith("<frozen")
    path = pathlib.Path(filename)
    return path.is_relative_to(_STANDARD) and path.relative_to(_STANDARD).parts[0] not in _SITES
