"""`smp.CheckpointManager`, with the original's arguments."""

from __future__ import annotations

import os
from typing import Any

from nanotf.compat import keras_optimizers
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
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

        Before the first step, variables do not exist yet. They get their values in that step, once
        the model is built, and the checkpoint's optimizers are then built for the model, too.

        Raises:
            ModelError: The call is before the first step, and the checkpoint holds an optimizer
                that is not built, but several models. Restore after the first step.
        """
        latest: str | None = self._manager.latest_checkpoint
        if latest is None:
            return None
        unbuilt = [model for model in self._models() if not model.built]
        if unbuilt:
            runtime.register_post_partition_hook(lambda: self._restore(latest))
        else:
            self._restore(latest)
        return latest

    def _restore(self, path: str) -> None:
        for optimizer in self._unbuilt_optimizers():
            optimizer.build(self._only_model().trainable_variables)
        self.checkpoint.restore(path)

    def _parts(self) -> list[Any]:
        view = require_tensorflow().train.TrackableView(self.checkpoint)
        return list(view.children(self.checkpoint).values())

    def _models(self) -> list[Any]:
        kind = require_tensorflow().keras.Model
        return [part for part in self._parts() if isinstance(part, kind)]

    def _unbuilt_optimizers(self) -> list[Any]:
        """Returns optimizers without slots; legacy ones restore their slots when they make them."""
        kind, *_ = keras_optimizers.optimizer_classes()
        found = [part for part in self._parts() if isinstance(part, kind)]
        return [part for part in found if not keras_optimizers.is_built(part)]

    def _only_model(self) -> Any:
        models = self._models()
        if len(models) != 1:
            raise ModelError(
                "A checkpoint is restored before the optimizer is built if it holds one model. "
                f"Received: {len(models)} models. Restore it after the first update."
            )
        return models[0]
