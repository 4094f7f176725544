"""Keras's own `fit`, without workers, with a report of where the time went."""

from __future__ import annotations

import inspect
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.parent.keras_call import KerasCall
from nanotf.report import call_report
from nanotf.report.stopwatch import Stopwatch


def fit(call: KerasCall, hint: str = "") -> Any:
    """Trains a model in this process, and reports it in `history.nanotf`.

    Args:
        call: the call of Keras's `fit`.
        hint: the end of the report's text, such as what may be faster.

    Returns:
        A `keras.callbacks.History`.

    Raises:
        Exception: What Keras raises.
    """
    stopwatch = Stopwatch(0, None)
    try:
        bound = inspect.signature(call.method).bind(*call.args, **call.kwargs)
    except TypeError:
        return call()  # raises Keras's own message
    given = bound.arguments.get("callbacks")
    callbacks = require_tensorflow().keras.callbacks
    passes = stopwatch.callback(callbacks.Callback)
    if isinstance(given, callbacks.CallbackList):  # the user's own list: joined for this call
        given.callbacks.insert(0, passes)
        try:
            history = call.method(*bound.args, **bound.kwargs)
        finally:
            given.callbacks.remove(passes)
    else:
        more = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
        bound.arguments["callbacks"] = [passes, *more]
        history = call.method(*bound.args, **bound.kwargs)
    history.nanotf = call_report.Report.of_one_process("fit", stopwatch.finish(), hint)
    return history
