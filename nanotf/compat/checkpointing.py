"""Objects that may refuse to be part of a `tf.train.Checkpoint`; what follows its write.

| name | why |
| --- | --- |
| `Trackable._trackable_children`, that of `AutoTrackable` | a checkpoint asks objects for their parts by it; no public hook is called before a file is written |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nanotf.compat.keras_optimizers import optimizer_classes
from nanotf.compat.replacements import Override


class AskedByCheckpoints:
    """A base, before that of Keras, of a model that may refuse to be part of a checkpoint."""

    def check_checkpoint(self) -> None:
        """Raises if a `tf.train.Checkpoint` must not save or restore the object."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "checkpoint":  # a SavedModel asks, too
            self.check_checkpoint()
        parent: Any = super()
        return parent._trackable_children(save_type, **kwargs)


def write_callbacks(options: Any) -> list[Callable[[str], Any]]:
    """Returns the functions that a checkpoint's write calls with the path that it has written.

    By one of them a `tf.train.CheckpointManager` knows its latest checkpoint and drops old ones. So
    a rank that leaves the write to another calls them itself.

    Args:
        options: `tf.train.CheckpointOptions`, or anything else, which has none.
    """
    found = getattr(options, "experimental_write_callbacks", None) or ()
    return [_of_a_path(callback) for callback in found]


def _of_a_path(callback: Callable[..., Any]) -> Callable[[str], Any]:
    # TensorFlow lets a callback take the path, or nothing.
    return callback if inspect.signature(callback).parameters else lambda _: callback()


def asking_optimizers(check: Callable[[Any], None], why: str) -> Override:
    """Returns the row of a table that makes checkpoints ask before they take an optimizer.

    Args:
        check: raises if an optimizer must not be saved or restored.
        why: the row's reason.
    """

    def asking(stock: Any, _: Any) -> Any:
        @functools.wraps(stock)
        def _trackable_children(self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
            if save_type == "checkpoint" and isinstance(self, optimizer_classes()):
                check(self)
            return stock(self, save_type, **kwargs)

        return _trackable_children

    # All optimizers inherit it, those of users, too, but for Keras 2's legacy ones: a checkpoint has
    # their slots only beside the variables, and so with a model, which is asked by itself.
    place = "tensorflow.python.trackable.autotrackable:AutoTrackable._trackable_children"
    return Override(place, why, asking)
