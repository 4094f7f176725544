"""Keeps Keras's progress bars quiet where a call leaves `verbose` at "auto".

Several workers train side by side, and none has the terminal. Keras decides what "auto" means in
two private places: Keras 2 (2.14 to 2.21) in a function that `fit`, `evaluate` and `predict` call,
Keras 3 (3.10 to 3.15) in the callback that draws the bar.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from nanotf.compat.replacements import KERAS_2, KERAS_3, Override

AUTO = "auto"

# Whether "auto" is quiet. Of the process, not of a thread: an item may train in threads of its own.
_quiet = threading.Event()


@contextlib.contextmanager
def quiet_by_default() -> Iterator[None]:
    """Makes "auto" mean 0 in this context, in a process that has installed `TABLE`."""
    _quiet.set()
    try:
        yield
    finally:
        _quiet.clear()


def _set_params(stock: Any, given: Any) -> Any:
    @functools.wraps(stock)
    def set_params(self: Any, params: Any) -> None:
        is_auto = _quiet.is_set() and params["verbose"] == AUTO
        # A copy: Keras gives all callbacks the same dict.
        stock(self, {**params, "verbose": 0} if is_auto else params)

    return set_params


def _get_verbosity(stock: Any, given: Any) -> Any:
    @functools.wraps(stock)
    def get_verbosity(verbose: Any, distribute_strategy: Any) -> Any:
        is_auto = _quiet.is_set() and verbose == AUTO
        return 0 if is_auto else stock(verbose, distribute_strategy)

    return get_verbosity


TABLE = (
    Override(
        "keras.src.engine.training:_get_verbosity",
        "`fit`, `evaluate` and `predict` ask it what their `verbose` means",
        _get_verbosity,
        KERAS_2,
    ),
    Override(
        "keras.src.callbacks.progbar_logger:ProgbarLogger.set_params",
        "it gets `verbose` as the caller has passed it",
        _set_params,
        KERAS_3,
    ),
)
