"""The needs of Keras's own callbacks at batch hooks, and other private facts about them.

| name | generation, versions seen | why |
| --- | --- | --- |
| `ModelCheckpoint._should_save_on_batch` | 2 and 3; 2.14, 2.15, tf_keras 2.15-2.21, 3.10-3.15 | weights are sent only at batches where it saves |
| `BackupAndRestore._should_save_on_batch` / `_batches_count` | 3 / 2 | as above |
| `CallbackList._in_begin_end_block_count` | 3; 3.12-3.15 | counts open begin/end pairs; the callback threads end with the last one |
"""

from __future__ import annotations

import copy
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
    LOGS = "logs"  # a call at every batch, with the logs of all workers
    SAVES = "saves"  # a call at every batch; the state where `saves_at` is True
    STATE = "state"  # a call at every batch, with the state in the user's model

    @property
    def is_each_batch(self) -> bool:
        """True if the callback must be called between any two batches."""
        return self in (Need.LOGS, Need.SAVES, Need.STATE)


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
    known = [Need.PROGRESS.value, Need.LOGS.value, Need.STATE.value]
    if said not in known:
        raise InvalidArgumentError(
            f"A callback's `nanotf_needs` must be one of {', '.join(map(repr, known))}. "
            f"Received: {type(callback).__name__}.nanotf_needs={said!r}."
        )
    return Need(said)


def need_at_batch(callback: Any, hook: str) -> Need:
    """Returns what a callback needs at a batch hook.

    Keras's own code is known. Other code may do anything, so it gets the state.

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
        return Need.STATE
    name = definer.__name__
    if name in ("ProgbarLogger", "History"):
        return Need.PROGRESS
    if name in ("ModelCheckpoint", "BackupAndRestore"):
        if not isinstance(callback.save_freq, int):
            return Need.NOTHING
        return Need.SAVES if hook.endswith("_end") else Need.LOGS
    if name == "TensorBoard":
        acts = generation().tensorboard_acts_at_batches(callback)
        return Need.LOGS if acts else Need.NOTHING
    if name in ("TerminateOnNaN", "BaseLogger"):
        return Need.LOGS
    return Need.STATE


def saves_at(callback: Any, batch: int) -> bool:
    """Returns True if a callback with need `SAVES` will save at the end of a batch.

    Args:
        callback: `ModelCheckpoint` or `BackupAndRestore`; it is not changed.
        batch: the index that its hook gets next.
    """
    # On a copy, since the method counts the batches of its calls.
    if hasattr(callback, "_should_save_on_batch"):
        return bool(copy.copy(callback)._should_save_on_batch(batch))
    return bool(callback._batches_count + 1 >= callback.save_freq)


def forget_open_evaluation(callback_list: Any) -> None:
    """Closes an evaluation inside `fit` whose end hooks were not called and never will be.

    Args:
        callback_list: Keras's `CallbackList`, in the middle of training.
    """
    if hasattr(callback_list, "_in_begin_end_block_count"):
        callback_list._in_begin_end_block_count = 1
