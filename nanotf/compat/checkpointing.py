"""Objects that know when a `tf.train.Checkpoint` saves or restores them.

| name | why |
| --- | --- |
| `Trackable._trackable_children` | a checkpoint asks objects for their parts by it; no public hook is called before a file is written |
"""

from __future__ import annotations

from typing import Any


class AskedByCheckpoints:
    """A base, before that of Keras, of a model that may refuse to be part of a checkpoint."""

    def check_checkpoint(self) -> None:
        """Raises if a `tf.train.Checkpoint` must not save or restore the object."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "checkpoint":
            self.check_checkpoint()
        parent: Any = super()
        return parent._trackable_children(save_type, **kwargs)
