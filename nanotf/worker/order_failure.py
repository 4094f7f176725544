"""The message that tells the parent of an exception in a call."""

from __future__ import annotations

import pickle
import traceback

from nanotf.compat import autograph, step_errors
from nanotf.errors import NanoError
from nanotf.shipping.objects import pickling
from nanotf.wire import messages


def order_failed(order: int, rank: int, error: BaseException) -> messages.OrderFailed:
    """Returns the message for a call that raised, with the exception if that can be pickled."""
    # An error of nanotf's own, which AutoGraph has replaced, reaches the user as it is.
    before = autograph.before_conversion(error)
    error = before if isinstance(before, NanoError) else error
    try:
        pickled = pickling.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle, but do not unpickle
    except BaseException:  # the parent then raises with the text alone
        pickled = b""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        reason, code = step_errors.reason(error), step_errors.users_lines(error)
    except Exception:  # the user's class may raise, whatever it is asked
        reason, code = "".join(traceback.format_exception_only(type(error), error)).strip(), ""
    return messages.OrderFailed(order, rank, type(error).__name__, reason, code, text, pickled)
