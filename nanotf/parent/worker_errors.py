"""Errors for what workers and readers have raised."""

from __future__ import annotations

import pickle

from nanotf.errors import WorkerError, catchable_as
from nanotf.pool.handles import Worker
from nanotf.wire import messages


def failure_of(
    worker: Worker,
    message: messages.OrderFailed,
    where: str = "",
    index: int | None = None,
    printed: str = "",
) -> WorkerError:
    """Returns the exception for a call that raised in a worker, of the original class if possible.

    Args:
        where: the item, in front of the sentence; empty for a call.
        index: of an item; None for a call.
        printed: what the item has printed, if that was kept.
    """
    who = f"{where}Worker {message.rank} ({worker.where()})"
    return worker_raised(worker.error(WorkerError, "", index=index, printed=printed), message, who)


def worker_raised(error: WorkerError, message: messages.OrderFailed, who: str) -> WorkerError:
    """Returns the error for what a worker or reader has raised, of the original class if possible.

    Args:
        error: names the process; without a text.
        who: the process, and what it did, for people.
    """
    code = f" in:\n{message.code}" if message.code else "."
    who = f"{who} raised {message.kind}{code}"
    error.message = error.what = f"{message.kind}: {message.reason}\n\n{who}"
    text = f"{message.reason}\n\n{who}" if message.reason else who
    error.remote_traceback = message.traceback
    try:
        original = pickle.loads(message.exception) if message.exception else None
    except Exception:  # the user's class may not unpickle here
        original = None
    return catchable_as(error, original, text)
