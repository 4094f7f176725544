"""The user's callbacks, run once, in the parent, on the user's own objects.

Workers report which hook of Keras's training loop they have reached; the parent calls the
user's callbacks, and at some hooks the workers wait for it, so that what a callback decides
(stop, a learning rate, weights) holds on all of them from the same step on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanotf import jobs
from nanotf.compat import keras_names
from nanotf.compat.versions import require_tensorflow

# Names that Keras's hooks had before, which still call the old ones by default.
_FORMER_NAMES = {
    "on_train_batch_begin": "on_batch_begin",
    "on_train_batch_end": "on_batch_end",
}


def _defines(callback: Any, hook: str) -> bool:
    base = require_tensorflow().keras.callbacks.Callback
    names = [hook, *([_FORMER_NAMES[hook]] if hook in _FORMER_NAMES else [])]
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(base, name)
        for name in names
    )


class ParentCallbacks:
    """Keras's callback list, and what the workers have to report for it.

    Args:
        callbacks: what the user gave `fit`: None, a callback, a list, or a `CallbackList`.
        model: the user's model.
        verbose: 0, 1, 2 or "auto", as in `fit`.
        epochs: int.
        steps: int or None, batches per epoch.

    Attributes:
        events: frozenset of str, hooks that rank 0 has to report.
        waits: frozenset of str, hooks at which all ranks have to wait.
        look_at_model: bool, whether some callback may read or change the model. Keras's own
            progress bar reads the step count where the number of steps is not known.
    """

    def __init__(
        self, callbacks: Any, model: Any, verbose: Any, epochs: int, steps: int | None
    ) -> None:
        keras = require_tensorflow().keras.callbacks
        list_class = keras_names.callback_list_class()
        if verbose == "auto":
            verbose = 1  # what it means to Keras outside of a parameter-server strategy
        if isinstance(callbacks, list_class):
            self.list: Any = callbacks
        else:
            self.list = list_class(
                callbacks,
                add_history=True,
                add_progbar=verbose != 0,
                model=model,
                verbose=verbose,
                epochs=epochs,
                steps=steps,
            )
        own = tuple(c for c in (keras.History, getattr(keras, "ProgbarLogger", None)) if c)
        users = [c for c in self.list.callbacks if not isinstance(c, own)]
        self.look_at_model = bool(users) or steps is None
        self.waits = self._hooks_of(users) | {"on_epoch_end", "on_train_end"}
        self.events = (self._hooks_of(self.list.callbacks) | {"on_epoch_begin"}) - self.waits

    @staticmethod
    def _hooks_of(callbacks: Iterable[Any]) -> frozenset[str]:
        return frozenset(h for h in jobs.HOOKS for c in callbacks if _defines(c, h))

    def call(self, hook: str, index: int | None, logs: Any) -> None:
        """Calls a hook of all callbacks, in Keras's order."""
        if hook.endswith("_batch_end"):
            begin = hook.replace("_end", "_begin")
            if begin not in self.waits:  # Keras 2 times batches from one to the other
                getattr(self.list, begin)(index)
        method = getattr(self.list, hook)
        if index is None:
            method(logs)
        else:
            method(index, logs)
