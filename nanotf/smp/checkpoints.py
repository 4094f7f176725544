"""`smp.CheckpointManager`, with the original's arguments."""

from __future__ import annotations

import os
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.smp import runtime

DIRECTORY = "/opt/ml/checkpoints"


class CheckpointManager:
    """Saves and restores a `tf.train.Checkpoint`, in TensorFlow's own format.

    Args:
        checkpoint: `tf.train.Checkpoint`.
        directory: str or path-like, default "/opt/ml/checkpoints".
        max_to_keep: int or None, the default, which keeps all.
        checkpoint_name: str, default "ckpt", the first part of the files' names.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str] = DIRECTORY,
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        runtime.current()
        self.checkpoint = checkpoint
        self._manager = require_tensorflow().train.CheckpointManager(
            checkpoint, os.fspath(directory), max_to_keep, checkpoint_name=checkpoint_name
        )

    def save(self) -> str:
        """Saves a checkpoint; returns its path."""
        return str(self._manager.save())

    def restore(self) -> str | None:
        """Restores the latest checkpoint, if there is one; returns its path.

        Before the first step, variables get their values when they are created.
        """
        latest: str | None = self._manager.latest_checkpoint
        if latest is not None:
            self.checkpoint.restore(latest)
        return latest
