"""Keras's own `fit`, without workers, with a report of where the time went.

If no callback looks at single steps, they run ahead of Keras's loop, see `compat.run_ahead`.
"""

from __future__ import annotations

import inspect
from typing import Any

from nanotf.compat import keras_callbacks, run_ahead
from nanotf.compat.keras_callbacks import Need
from nanotf.compat.versions import require_tensorflow
from nanotf.parent.keras_call import KerasCall
from nanotf.report import call_report
from nanotf.report.stopwatch import Stopwatch
from nanotf.shipping import orders


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
    tf = require_tensorflow()
    callbacks = tf.keras.callbacks
    passes = stopwatch.callback(callbacks.Callback)
    if isinstance(given, callbacks.CallbackList):  # the user's own list: joined for this call
        given.callbacks.insert(0, passes)
        try:
            history = call.method(*bound.args, **bound.kwargs)
        finally:
            given.callbacks.remove(passes)
    else:
        users = [] if given is None else tf.nest.flatten(given)  # lists in lists, as Keras does
        lets = [] if any(map(_looks_at_steps, users)) else [run_ahead.callback()]
        bound.arguments["callbacks"] = [passes, *lets, *users]
        try:
            history = call.method(*bound.args, **bound.kwargs)
        finally:
            run_ahead.end(call.model)
    history.nanotf = call_report.Report.of_one_process(stopwatch.finish(), hint)
    return history


def _looks_at_steps(callback: Any) -> bool:
    """Returns True if a callback looks at each step. Keras's progress bar does not."""
    return any(
        keras_callbacks.need_at_batch(callback, hook) is Need.EACH_BATCH
        for hook in orders.TRAIN_BATCH_HOOKS
    )
