"""Checkpoints of a custom training loop: written once, restored everywhere."""

from __future__ import annotations

import os
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.console import say
from nanotf.region import context


class CheckpointManager:
    """`tf.train.CheckpointManager` for `@nano` functions and for a single process.

    In a `@nano` function every worker calls `save` and `restore_or_initialize`. Rank 0 writes the
    files; the others wait until they are complete. The files have TensorFlow's own format and can
    be restored without a strategy.

    Args:
        checkpoint: `tf.train.Checkpoint`.
        directory: str or path-like.
        max_to_keep: int or None, like all further arguments as in `tf.train.CheckpointManager`.
        **options: keep_checkpoint_every_n_hours, checkpoint_name, step_counter,
            checkpoint_interval, init_fn, last_checkpoint_step.

    Raises:
        ValueError: as raised by `tf.train.CheckpointManager`.
    """

    def __init__(
        self, checkpoint: Any, directory: Any, max_to_keep: int | None, **options: Any
    ) -> None:
        self._arguments = (checkpoint, os.fspath(directory), max_to_keep, options)
        self.checkpoint = checkpoint
        self._manager = self._make(os.fspath(directory))

    def _make(self, directory: str) -> Any:
        checkpoint, _, max_to_keep, options = self._arguments
        manager_class = require_tensorflow().train.CheckpointManager
        return manager_class(checkpoint, directory, max_to_keep, **options)

    def __reduce__(self) -> Any:
        return _remake, self._arguments

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return str(self._arguments[1])

    @property
    def checkpoints(self) -> list[str]:
        """The kept checkpoints, oldest first."""
        self._look_again()
        return list(self._manager.checkpoints)

    @property
    def latest_checkpoint(self) -> str | None:
        """The last checkpoint; None before the first."""
        found = self.checkpoints
        return found[-1] if found else None

    def _look_again(self) -> None:
        """Picks up checkpoints that another process has written, such as rank 0 for the parent."""
        # A worker's manager takes part in every save, see `once`.
        if context.current is not None:
            return
        state = require_tensorflow().train.get_checkpoint_state(self.directory)
        written = [] if state is None else list(state.all_model_checkpoint_paths)
        if written != list(self._manager.checkpoints):
            # TensorFlow's manager reads the list only when it is made.
            self._manager = self._make(self.directory)

    def save(
        self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None
    ) -> str | None:
        """Saves a checkpoint and returns when its files are complete.

        Args:
            checkpoint_number, check_interval, options: as in `tf.train.CheckpointManager`.

        Returns:
            The path, on every rank; None if the interval is not over.
        """
        path: str | None
        self._look_again()
        if context.current is not None:
            context.current.before_save()
        path = self._manager.save(checkpoint_number, check_interval, options)
        if context.current is not None and context.is_chief() and path is not None:
            context.current.saved(path)
        return path

    def restore_or_initialize(self) -> str | None:
        """Restores the last checkpoint on every worker; calls the option init_fn if there is none.

        Prints one line if there is one.

        Returns:
            The restored path, or None.
        """
        self._look_again()
        path: str | None = self._manager.restore_or_initialize()
        if context.current is not None:
            context.current.restored(path)
        if path is not None and context.is_chief():
            counter = self._arguments[3].get("step_counter")
            step = "" if counter is None else f", after step {int(counter)}"
            say(f"Continues from {path}{step}.")
        return path


def _remake(checkpoint: Any, directory: str, max_to_keep: int | None, options: Any) -> Any:
    return CheckpointManager(checkpoint, directory, max_to_keep, **options)
