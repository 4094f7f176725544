"""Tables of what ranks replace in TensorFlow and Keras.

Keras 3 trains wrongly or not at all under a strategy of several processes,
https://github.com/keras-team/keras/issues/20585. `KERAS` corrects it. `FILES` makes the ranks of a
script for one process write its files once. `LOSS_SCALES` makes ranks skip the same steps.
"""

from __future__ import annotations

import contextvars
import functools
from typing import Any

import tensorflow as tf

from nanotf.compat.replacements import ANY, KERAS_2, KERAS_3, Override
from nanotf.ranks import loss_scales, rank_files


def _reducing(stock: Any, _: Any) -> Any:
    """Takes this rank's value of what a step returns, and not a mean over the axis of rows.

    Keras only shows it. It sums metrics over replicas when it reads their variables.
    """

    @functools.wraps(stock)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction in ("auto", "mean", "first"):
            return _local(values, strategy)
        return stock(values, strategy, reduction)

    return reduce_per_replica


def _building(stock: Any, _: Any) -> Any:
    """Builds a model on this rank's rows of a batch, and not on their mean over replicas."""

    @functools.wraps(stock)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        # Without a strategy, `iterator` must not lose a batch.
        if iterator is not None and self._distribute_strategy is not None:
            for *_, batches in iterator:  # Keras 3.10 yields two, later versions three
                data_batch = _local(next(batches), self.distribute_strategy)
                break
            iterator = None
        stock(self, iterator, data_batch)

    return _maybe_symbolic_build


def _local(values: Any, strategy: Any) -> Any:
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)


# Set while reduced gradients are clipped.
_clipping: contextvars.ContextVar[bool] = contextvars.ContextVar("clipping", default=False)


def _is_divided() -> bool:
    """Returns True in a replica among several, whose gradients are still to be summed."""
    several = tf.distribute.get_strategy().num_replicas_in_sync > 1
    return bool(several and tf.distribute.get_replica_context() is not None)


def _clipping_later(stock: Any, _: Any) -> Any:
    @functools.wraps(stock)
    def _clip_gradients(self: Any, grads: Any) -> Any:
        # In a replica Keras calls this before the sum, and `_clipping_sums` after it.
        return stock(self, grads) if _clipping.get() or not _is_divided() else grads

    return _clip_gradients


def _clipping_sums(stock: Any, _: Any) -> Any:
    """Clips gradients once they are summed, as one process does."""

    @functools.wraps(stock)
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        pairs = list(stock(self, grads_and_vars))
        if not pairs or not _is_divided():  # `zip` makes no two lists of no pairs
            return pairs
        grads, variables = map(list, zip(*pairs, strict=True))
        before = _clipping.set(True)
        try:
            return list(zip(self._clip_gradients(grads), variables, strict=True))
        finally:
            _clipping.reset(before)

    return _all_reduce_sum_gradients


_TRAINER = "keras.src.backend.tensorflow.trainer"
_KERAS_FILES = "keras.src.utils.file_utils"
_ONCE = "all ranks run the script, but only one writes its files"

_SKIPS = "a rank whose own gradients overflow would skip the step, and the others wait for it"

LOSS_SCALES: tuple[Override, ...] = (
    Override("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply", _SKIPS, loss_scales.applying, KERAS_3),
    *(
        Override(f"keras.src.mixed_precision.loss_scale_optimizer:{name}.apply_gradients", _SKIPS, loss_scales.applying_pairs, KERAS_2)
        for name in ("LossScaleOptimizer", "LossScaleOptimizerV3")
    ),
)  # fmt: skip

KERAS: tuple[Override, ...] = (
    Override(f"{_TRAINER}:reduce_per_replica", "reduces scalars over axis 0", _reducing, KERAS_3),
    Override(f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build", "feeds a per-replica value to a reduction", _building, KERAS_3),
    Override("keras.src.optimizers.base_optimizer:BaseOptimizer._clip_gradients", "clips gradients before their sum", _clipping_later, KERAS_3),
    Override("keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients", "clips gradients before their sum", _clipping_sums, KERAS_3),
)  # fmt: skip

FILES: tuple[Override, ...] = (
    Override("tensorflow:train.Checkpoint._write", _ONCE, rank_files.writing("file_prefix")),
    Override("tensorflow:saved_model.save", _ONCE, rank_files.writing("export_dir")),
    *(
        Override(f"tensorflow:keras.{name}", _ONCE, rank_files.writing("filepath"))
        for name in ("Model.save", "Model.save_weights", "Model.export", "models.save_model")
    ),
    Override("tensorflow.python.checkpoint.checkpoint_management:update_checkpoint_state_internal", _ONCE, rank_files.changing("save_dir")),
    Override("tensorflow.python.checkpoint.checkpoint_management:_delete_file_if_exists", _ONCE, rank_files.changing("filespec")),
    *(
        Override(f"tensorflow:keras.callbacks.{name}", _ONCE, rank_files.working_with(attribute), versions)
        for name, attribute, versions in (
            ("ModelCheckpoint._save_model", "filepath", ANY),
            ("BackupAndRestore.on_train_begin", "backup_dir", ANY),
            ("BackupAndRestore._save_model", "backup_dir", KERAS_3),
            ("BackupAndRestore.on_train_end", "backup_dir", ANY),
        )
    ),
    Override("tensorflow:keras.Model.load_weights", _ONCE, rank_files.reading),
    Override("tensorflow:io.gfile.rmtree", _ONCE, rank_files.leaving, KERAS_2),
    Override(f"{_KERAS_FILES}:exists", _ONCE, rank_files.asking, KERAS_3),
    Override(f"{_KERAS_FILES}:File", _ONCE, rank_files.opening, KERAS_3),
    *(
        Override(f"{_KERAS_FILES}:{name}", _ONCE, rank_files.leaving, KERAS_3)
        for name in ("copy", "makedirs", "remove", "rmtree")
    ),
    Override("tensorflow:summary.create_file_writer", _ONCE, rank_files.making_writers),
    Override("tensorflow:keras.callbacks.CSVLogger.on_train_begin", _ONCE, rank_files.logging_rows),
)  # fmt: skip
