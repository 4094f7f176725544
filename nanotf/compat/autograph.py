"""AutoGraph (identical in TensorFlow 2.14 to 2.21).

**Missing rules** (TensorFlow 2.16 with tf_keras).
`tensorflow.python.autograph.core.config.CONVERSION_RULES` names the packages whose code is not
converted. In 2.16 it names `keras` but not `tf_keras`. The first trace of every legacy model then
converts all of tf_keras, which takes 11 to 16 s. Later versions have the rule. nanotf's code around
a user's step stays as it is, too.

**Leftover files.** `tensorflow.python.autograph.pyct.loader.load_source` writes each converted
function to a temporary file and removes it when Python exits. A worker does not exit that way.

**Errors.** `api.StagingError` replaces errors of unknown classes that converted code raises.

**Steps.** `ag_ctx.ControlStatusCtx` and `converter.ConversionOptions` tell `tf_convert` what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
import pathlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python.autograph.core import ag_ctx, config, converter
from tensorflow.python.autograph.impl import api


def leave_alone(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns AutoGraph's rules with those for tf_keras and nanotf, where they are missing."""
    known = {getattr(rule, "_prefix", None) for rule in rules}
    missing = [name for name in ("tf_keras", "nanotf") if name not in known]
    return (*map(config.DoNotConvert, missing), *rules)  # the first rule that matches decides


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """Makes code in this context convert what it calls by `tf_convert`, as Keras 2's layers do.

    An error passes as it is. In a function that AutoGraph itself converts, one of nanotf's own
    would become a `StagingError`.
    """
    options = converter.ConversionOptions(recursive=True, user_requested=True)
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, options):
        yield


def before_conversion(error: BaseException) -> BaseException:
    """Returns the error that AutoGraph has replaced with one of its own, else the error itself."""
    while isinstance(error, api.StagingError) and error.__context__ is not None:
        error = error.__context__  # Keras, too, makes a new one to add the call's arguments
    return error


def keep_no_files(load_source: Any) -> Any:
    """Makes a `load_source` that removes AutoGraph's temporary files once they are loaded."""

    @functools.wraps(load_source)
    def load(source: str, delete_on_exit: bool) -> Any:
        module, path = load_source(source, False)
        # For tracebacks; without a modification time, linecache does not check the disk again.
        linecache.cache[path] = (len(source), None, source.splitlines(True), path)
        for written in (path, importlib.util.cache_from_source(path)):
            with contextlib.suppress(OSError):
                pathlib.Path(written).unlink()
        return module, path

    return load
