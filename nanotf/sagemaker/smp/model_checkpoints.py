"""`smp.CheckpointManager`, with the original's arguments."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from nanotf.compat import keras_optimizers
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError, ModelError
from nanotf.sagemaker.smp import communication, partitioned, runtime
from nanotf.sagemaker.smp.step_model import StepModel

DIRECTORY = "/opt/ml/checkpoints"  # which SageMaker copies to S3 for jobs that ask for it


class PartitionedCheckpointManager:
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
        runtime.current()  # raises before `init`
        self.checkpoint = checkpoint
        self._is_partial = runtime.mp_size() > 1
        folder = pathlib.Path(directory)
        if self._is_partial:
            folder /= f"partition_{runtime.mp_rank()}"  # all partitions' files have equal names
        # What is saved: the checkpoint, or the part of it that this process holds.
        train = require_tensorflow().train
        self._saved = train.Checkpoint() if self._is_partial else checkpoint
        self._folder = str(folder)
        self._manager = train.CheckpointManager(
            self._saved, self._folder, max_to_keep, checkpoint_name=checkpoint_name
        )

    def save(self) -> str:
        """Saves a checkpoint; returns its path.

        All ranks call this. With several partitions, each saves the part that it holds, into a
        folder of its own, in the first copy of the model.

        Raises:
            ModelError: A model in several partitions has not been called in a step.
        """
        self._take_part()
        path = None
        if runtime.dp_rank() == 0:
            with runtime.setting(partitioned.saves_parts, True):
                path = str(self._manager.save())
        # No rank continues before all files are complete. The folder does not tell the path: the
        # first copy may have saved the next one already.
        paths = communication.allgather(path)
        return str(paths[runtime.get_dp_group()[0]])

    def _take_part(self) -> None:
        """Makes `_saved` the part of the checkpoint that this process holds."""
        if not self._is_partial:
            return
        for name, part in self._children().items():
            if isinstance(part, StepModel):
                if not partitioned.is_cut(part):
                    raise ModelError(
                        "A model in several partitions is saved after a step has called it. "
                        f"Received: save() with {part.name!r}, which no step has called."
                    )
                part = partitioned.begun(part).numbered()
            setattr(self._saved, name, part)  # anew: a later kind of call may make variables

    @property
    def directory(self) -> str:
        """The folder of the files of this rank."""
        return self._folder

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints in the folder, the oldest first."""
        # TensorFlow's manager knows those that it has saved, and the first copy of a model saves.
        state = require_tensorflow().train.get_checkpoint_state(self._folder)
        return [] if state is None else list(state.all_model_checkpoint_paths)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest checkpoint in the folder, None if there is none."""
        return next(reversed(self.checkpoints), None)

    def restore(self, restore_prefix: str | None = None) -> str | None:
        """Restores a checkpoint, if there is one; returns its path. All ranks call this.

        Before the first step, variables do not exist yet. They get their values in that step, once
        the model is built, and the checkpoint's optimizers are then built for the model, too.

        Args:
            restore_prefix: str or None, a path that `save` has returned, on any rank; None takes
                the latest checkpoint that all ranks find.

        Raises:
            InvalidArgumentError: There is no such checkpoint.
            ModelError: The call is before the first step, and the checkpoint holds an optimizer
                that is not built, but several models. Restore after the first step.
        """
        latest = self._latest() if restore_prefix is None else self._named(restore_prefix)
        if latest is None:
            return None
        is_ready = partitioned.is_cut if self._is_partial else lambda model: model.built
        if not all(is_ready(model) for model in self._models()):
            runtime.register_post_partition_hook(lambda: self._restore(latest))
        else:
            self._restore(latest)
        return latest

    def _restore(self, path: str) -> None:
        for optimizer in self._unbuilt_optimizers():
            optimizer.build(self._only_model().trainable_variables)
        self._take_part()
        with runtime.setting(partitioned.saves_parts, True):
            self._saved.restore(path)
        communication.barrier()  # the next save of the first copy may delete the files

    def _named(self, prefix: str) -> str:
        """Returns the path of this rank's part of a checkpoint."""
        found = {pathlib.Path(path).name: path for path in self.checkpoints}
        name = pathlib.Path(prefix).name
        if name not in found:
            raise InvalidArgumentError(
                "restore_prefix must be a path that save() has returned. Received: "
                f"restore_prefix={prefix!r}; {self._folder} has {', '.join(found) or 'none'}."
            )
        return found[name]

    def _latest(self) -> str | None:
        """Returns the latest checkpoint that all ranks find."""
        own = {pathlib.Path(path).name: path for path in self.checkpoints}
        others = communication.allgather(list(own))
        # A run that was killed in `save` may have saved the last one of some partitions alone, and
        # the first copy may save one more before another copy looks.
        common = [name for name in own if all(name in names for names in others)]
        return own[common[-1]] if common else None

    def _children(self) -> dict[str, Any]:
        view = require_tensorflow().train.TrackableView(self.checkpoint)
        found = dict(view.children(self.checkpoint))
        found.pop("save_counter", None)  # of the checkpoint itself
        return found

    def _models(self) -> list[Any]:
        kind = require_tensorflow().keras.Model
        return [part for part in self._children().values() if isinstance(part, kind)]

    def _unbuilt_optimizers(self) -> list[Any]:
        """Returns optimizers without slots; legacy ones restore their slots when they make them."""
        kind, *_ = keras_optimizers.optimizer_classes()
        found = [part for part in self._children().values() if isinstance(part, kind)]
        return [part for part in found if not keras_optimizers.is_built(part)]

    def _only_model(self) -> Any:
        models = self._models()
        if len(models) != 1:  # an unbuilt optimizer does not know whose variables it updates
            raise ModelError(
                "A checkpoint is restored before the optimizer is built if it holds one model. "
                f"Received: {len(models)} models. Restore it after the first update."
            )
        return models[0]


CheckpointManager = PartitionedCheckpointManager  # its public name
