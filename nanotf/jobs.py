"""What a job consists of, as the parent ships it to the workers."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.optimizer_shards import OptimizerShards
from nanotf.shipping.state import StateLayout

# Keras's callback hooks, in the words of `tf.keras.callbacks.Callback`.
EPOCH_HOOKS = ("on_epoch_begin", "on_epoch_end")
BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
)
PLAIN_HOOKS = ("on_test_begin", "on_test_end", "on_train_end")
HOOKS = EPOCH_HOOKS + BATCH_HOOKS + PLAIN_HOOKS


def index_and_logs(hook: str, *arguments: Any, **named: Any) -> tuple[int | None, Any]:
    """The epoch or batch (None for a hook without one) and the logs (or None) of a hook's call."""
    values = [*arguments, *named.values()]
    index = values.pop(0) if hook in EPOCH_HOOKS + BATCH_HOOKS else None
    return index, values[0] if values else None


@dataclasses.dataclass(frozen=True)
class KerasSettings:
    """Keras's global settings, which a worker takes over from the parent.

    Args:
        floatx: str, the default float type.
        image_data_format: str.
    """

    floatx: str
    image_data_format: str


@dataclasses.dataclass(frozen=True)
class FitJob:
    """One `fit`.

    Args:
        recipe: bytes, the pickled `shipping.models.ModelRecipe`. Equal bytes mean that a worker
            can go on with the model that it has, and with its traced functions.
        settings: `KerasSettings`.
        specs: nested structure of `tf.TensorSpec`, of one global batch.
        train: `ArrayInput` or `StreamInput`.
        validation: same, or None.
        epochs: int, index of the epoch after the last.
        initial_epoch: int.
        initial_step: int, in that epoch; 0 unless `BackupAndRestore` of Keras 2 resumes.
        steps_per_epoch: int or None.
        validation_steps: int or None.
        validation_freq: int or list of int, as `fit` takes it.
        layout: `StateLayout` of the model's variables, then the optimizer's.
        state_block: int, which of the job's blocks holds the state.
        shards: `OptimizerShards`, or None where each worker makes the whole update.
        events: frozenset of str, hooks that rank 0 reports.
        waits: frozenset of str, hooks at which all ranks wait for the parent's answer.
        asks: frozenset of str, the batch hooks among them at which they store their state.
        metrics_layout: `StateLayout` of what `keras_names.metric_state` lists.
        metrics_block: int, which of the job's blocks holds it.
        stop: bool, whether to stop after one batch, as `on_train_begin` wanted.
        seed: int, of the job's random numbers.
    """

    recipe: bytes
    settings: KerasSettings
    specs: Any
    train: Any
    validation: Any
    epochs: int
    initial_epoch: int
    initial_step: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_freq: Any
    layout: StateLayout
    state_block: int
    shards: OptimizerShards | None
    events: frozenset[str]
    waits: frozenset[str]
    asks: frozenset[str]
    metrics_layout: StateLayout
    metrics_block: int
    stop: bool
    seed: int
