"""The needs of Keras's own callbacks at batch hooks, and other private facts about them.

| name | generation, versions seen | why |
| --- | --- | --- |
| `CallbackList._in_begin_end_block_count` | 3; 3.12-3.15 | counts open begin/end pairs; the callback threads end with the last one |
"""

from __future__ import annotations

import enum
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.versions import keras_module_name, require_tensorflow
from nanotf.errors import InvalidArgumentError

# Former names of Keras's hooks. By default a hook still calls its former name.
FORMER_NAMES = {
    "on_train_batch_begin": "on_batch_begin",
    "on_train_batch_end": "on_batch_end",
}


class Need(enum.Enum):
    """A callback's need at a batch hook."""

    NOTHING = "nothing"  # the hook does nothing there
    PROGRESS = "progress"  # an occasional call
    EACH_BATCH = "batches"  # a call between any two batches


def _definer(callback: Any, hook: str) -> type | None:
    """Returns the class whose code a hook runs, None if that is Keras's empty base class."""
    base = require_tensorflow().keras.callbacks.Callback
    names = [hook, *([FORMER_NAMES[hook]] if hook in FORMER_NAMES else [])]
    if any(name in getattr(callback, "__dict__", ()) for name in names):
        return object  # a user's function, as in LambdaCallback
    for cls in type(callback).__mro__:
        if cls is base:
            return None
        if any(name in vars(cls) for name in names):
            return cls
    return None


def defines(callback: Any, hook: str) -> bool:
    """Returns True if a callback has code of its own for a hook."""
    return _definer(callback, hook) is not None


def said_need(callback: Any) -> Need | None:
    """Returns the need that a callback declares in its attribute `nanotf_needs`.

    Raises:
        InvalidArgumentError: The attribute is not one of "progress", "logs" and "state".
    """
    said = getattr(callback, "nanotf_needs", None)
    if said is None:
        return None
    known = {"progress": Need.PROGRESS, "logs": Need.EACH_BATCH, "state": Need.EACH_BATCH}
    if said not in known:
        raise InvalidArgumentError(
            f"A callback's `nanotf_needs` must be one of {', '.join(map(repr, known))}. "
            f"Received: {type(callback).__name__}.nanotf_needs={said!r}."
        )
    return known[said]


def need_at_batch(callback: Any, hook: str) -> Need:
    """Returns what a callback needs at a batch hook.

    Keras's own code is known. Other code may do anything.

    Args:
        callback: a Keras callback.
        hook: one of `orders.BATCH_HOOKS`.
    """
    definer = _definer(callback, hook)
    if definer is None:
        return Need.NOTHING
    said = said_need(callback)
    if said is not None:
        return said
    if definer.__module__.split(".")[0] != keras_module_name():
        return Need.EACH_BATCH
    name = definer.__name__
    if name in ("ProgbarLogger", "History"):
        return Need.PROGRESS
    if name in ("ModelCheckpoint", "BackupAndRestore"):
        # Otherwise it is "epoch".
        return Need.EACH_BATCH if isinstance(callback.save_freq, int) else Need.NOTHING
    if name == "TensorBoard":
        acts = generation().tensorboard_acts_at_batches(callback)
        return Need.EACH_BATCH if acts else Need.NOTHING
    return Need.EACH_BATCH


def forget_open_evaluation(callback_list: Any) -> None:
    """Closes an evaluation inside `fit` whose end hooks were not called and never will be.

    Args:
        callback_list: Keras's `CallbackList`, in the middle of training.
    """
    if hasattr(callback_list, "_in_begin_end_block_count"):
        callback_list._in_begin_end_block_count = 1  # that of training, still open
