"""The user's callbacks, run once, in the parent, on the user's own objects.

Workers report each hook that they reach in Keras's training loop, and the parent calls the user's
callbacks. At some hooks the workers wait for the parent, so that a callback's decision (stop, a
learning rate, weights) takes effect on all of them at the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from nanotf.compat import keras_callbacks, keras_models
from nanotf.compat.generation import generation
from nanotf.compat.keras_callbacks import Need
from nanotf.compat.versions import require_tensorflow
from nanotf.shipping import orders


@dataclasses.dataclass(frozen=True)
class Unrecorded:
    """A completed epoch that `History`, the last callback, may not have recorded yet."""

    turn: int  # the turn of the state block with the state after the epoch
    epoch: int | None
    logs: Any  # what `on_epoch_end` gets
    # The result of `ParentCallbacks.recorded` before the callbacks of the epoch's end
    recorded: list[dict[str, int]]


def list_of(
    kind: Callable[..., Any],
    callbacks: Any,
    model: Any,
    verbose: Any,
    epochs: int,
    steps: int | None,
    add_history: bool = True,
) -> Any:
    """Makes the callback list of a call, of Keras's class or one derived from it, as Keras does."""
    shown = generation().auto_verbose() if verbose == "auto" else verbose
    return kind(
        callbacks,
        add_history=add_history,
        add_progbar=shown != 0,
        model=model,
        verbose=shown,
        epochs=epochs,
        steps=steps,
    )


class ParentCallbacks:
    """Keras's callback list, and the hooks that the workers must report for it.

    Args:
        callbacks: the argument of `fit`: None, a callback, a list, or a `CallbackList`.
        model: the user's model.
        verbose: 0, 1, 2 or "auto", as in `fit`.
        steps: batches per epoch; None if unknown.
        add_history: whether the list begins a `History`, if it is made here.

    Attributes:
        events: frozenset of str, hooks that rank 0 must report.
        waits: frozenset of str, hooks at which all ranks must wait.
        look_at_model: bool, whether some callback may read or change the model. Keras's own
            progress bar reads the step count if the number of steps is unknown.
    """

    def __init__(
        self,
        callbacks: Any,
        model: Any,
        verbose: Any,
        epochs: int,
        steps: int | None,
        add_history: bool = True,
    ) -> None:
        keras = require_tensorflow().keras.callbacks
        self.list: Any = callbacks
        kind = keras_models.callback_list_class()
        if not isinstance(callbacks, kind):
            self.list = list_of(kind, callbacks, model, verbose, epochs, steps, add_history)
        own = (keras.History, getattr(keras, "ProgbarLogger", None))
        users = [
            c
            for c in self.list.callbacks
            # By exact class: a subclass of the user's may look at the model.
            if type(c) not in own and keras_callbacks.said_need(c) is not Need.PROGRESS
        ]
        self._histories = [
            c
            for c in self.list.callbacks
            if isinstance(c, keras.History) and type(c).on_epoch_end is keras.History.on_epoch_end
        ]
        self.look_at_model = bool(users) or steps is None
        needs = [
            (hook, keras_callbacks.need_at_batch(callback, hook))
            for hook in orders.BATCH_HOOKS
            for callback in self.list.callbacks
        ]
        at_batches = {hook for hook, need in needs if need is Need.EACH_BATCH}
        progress = {hook for hook, need in needs if need is Need.PROGRESS}
        elsewhere = self._hooks_of(users) - set(orders.BATCH_HOOKS)
        self.waits = elsewhere | at_batches | {"on_epoch_end", "on_train_end"}
        others = self._hooks_of(self.list.callbacks) - set(orders.BATCH_HOOKS)
        if "on_test_end" in others:  # Keras 3 counts the pairs
            others |= {"on_test_begin"}
        self.events = (others | progress | {"on_epoch_begin"}) - self.waits

    def wait_at_validation(self) -> None:
        """Makes all ranks wait at the beginning of a validation, with their state."""
        self.waits |= {"on_test_begin"}
        self.events = (self.events | {"on_test_end"}) - self.waits

    @staticmethod
    def _hooks_of(callbacks: Iterable[Any]) -> frozenset[str]:
        return frozenset(
            h for h in orders.HOOKS for c in callbacks if keras_callbacks.defines(c, h)
        )

    def call(self, hook: str, index: int | None, logs: Any) -> None:
        """Calls a hook of all callbacks, in Keras's order."""
        if hook.endswith("_batch_end"):
            begin = hook.replace("_end", "_begin")
            if begin not in self.waits:  # Keras 2 times batches from the begin hook to the end hook
                getattr(self.list, begin)(index)
        method = getattr(self.list, hook)
        if index is None:
            method(logs)
        else:
            method(index, logs)

    def recorded(self) -> list[dict[str, int]]:
        """Returns the number of epochs that each `History` has recorded, by the names of logs."""
        return [
            {name: len(values) for name, values in history.history.items()}
            for history in self._histories
        ]

    def record(self, epoch: int | None, logs: Any, before: list[dict[str, int]]) -> None:
        """Makes each `History` record an epoch, unless it already has.

        Args:
            logs: the epoch's metrics by name.
            before: the result of `recorded` before the callbacks of the epoch's end.
        """
        for history, counts in zip(self._histories, before, strict=True):
            found = history.history
            if all(len(found.get(name, ())) > counts.get(name, 0) for name in logs):
                continue
            if history.epoch[-1:] == [epoch]:  # it was interrupted
                history.epoch.pop()
            for name in list(found):
                del found[name][counts.get(name, 0) :]  # what the interrupted hook has recorded
            history.on_epoch_end(epoch, logs)
