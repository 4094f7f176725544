"""AutoGraph (seen alike in 2.14 to 2.21).

**A rule that it lacks** (TensorFlow 2.16 with tf_keras).
`tensorflow.python.autograph.core.config.CONVERSION_RULES` names the packages whose code is not
converted. In 2.16 it names `keras` but not `tf_keras`, so that the first trace of every legacy
model converts all of tf_keras, which takes 11 to 16 s. Later versions have the rule.

**Files that it leaves.** `tensorflow.python.autograph.pyct.loader.load_source` writes each
function that it has converted to a temporary file, which it removes when Python ends. A worker
does not end that way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
import pathlib
from typing import Any

from tensorflow.python.autograph.core import config


def leave_tf_keras_alone(rules: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rules of AutoGraph with the missing one."""
    if any(getattr(rule, "_prefix", None) == "tf_keras" for rule in rules):
        return rules
    return (config.DoNotConvert("tf_keras"), *rules)


def keep_no_files(load_source: Any) -> Any:
    """Makes a `load_source` that removes AutoGraph's temporary files once they are loaded."""

    @functools.wraps(load_source)
    def load(source: str, delete_on_exit: bool) -> Any:
        module, path = load_source(source, False)
        # For tracebacks; an entry without a time is not looked for on the disk again.
        linecache.cache[path] = (len(source), None, source.splitlines(True), path)
        for written in (path, importlib.util.cache_from_source(path)):
            with contextlib.suppress(OSError):
                pathlib.Path(written).unlink()
        return module, path

    return load
