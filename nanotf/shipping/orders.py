"""Orders that the parent sends to the workers, and their results."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from typing import Any

from nanotf.compat.chance import Chance
from nanotf.region.sharded_update import OptimizerShards
from nanotf.shipping.state import StateLayout

# Keras's callback hooks, in the words of `tf.keras.callbacks.Callback`.
EPOCH_HOOKS = ("on_epoch_begin", "on_epoch_end")
BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
)
TRAIN_BATCH_HOOKS = BATCH_HOOKS[:2]
PAUSE = "pause"  # no hook of Keras's: all ranks wait after a step, with their state
PLAIN_HOOKS = ("on_test_begin", "on_test_end", "on_train_end")
HOOKS = EPOCH_HOOKS + BATCH_HOOKS + PLAIN_HOOKS

# The turns of the block of metrics. The values at the start of a call have a turn of their own: a
# rank that reaches its first hook stores its metrics, which Keras has just reset, while another
# rank may still have to load the values of the start.
METRICS, FIRST_METRICS = 0, 1


def index_and_logs(hook: str, *arguments: Any, **named: Any) -> tuple[int | None, Any]:
    """Returns the epoch or batch (None for a hook without one) and the logs (or None) of a hook."""
    values = [*arguments, *named.values()]
    index = values.pop(0) if hook in EPOCH_HOOKS + BATCH_HOOKS else None
    return index, values[0] if values else None


@dataclasses.dataclass(frozen=True)
class ModelOrder:
    """Base of the orders for a model's methods."""

    heap: bytes  # the model, pickled by `shipping.objects.heap.dump_model`
    # See `parent.traced.TracedModel.number`. If it and the bytes are equal, a worker reuses the
    # model that it has, and its traced functions.
    trace: int
    specs: Any  # nested structure of `tf.TensorSpec`, of one global batch
    layout: StateLayout  # of the model's variables, then, in `FitOrder`, the optimizer's
    captured: tuple[int, ...]  # the numbers in the heap of the variables that come last there
    state_block: int  # the number of the call's block that holds the state
    events: frozenset[str]  # hooks that rank 0 reports
    waits: frozenset[str]  # hooks at which all ranks wait for the parent's answer
    chance: Chance  # the random states, the same for all ranks
    seeding: int  # see `eager_context.seeding`
    terminal: Terminal
    quiet: bool  # whether rank 0's prints stay out of the terminal
    # By the place in `keras_metrics.metric_state`: values (`numpy.ndarray`) of metrics that Keras
    # has not built yet, and so does not reset before the first epoch.
    unreset: dict[int, Any]
    summaries: bool  # whether the parent has a default writer of summaries


@dataclasses.dataclass(frozen=True)
class FitOrder(ModelOrder):
    """One `fit`. A worker's result is a bool, see `Left.runs_python`."""

    train: Any  # `ArrayInput`, `StreamInput` or `PipelineInput`
    validation: Any  # same, or None
    epochs: int  # index of the epoch after the last
    initial_epoch: int
    # The first step in that epoch; 0 unless Keras 2's `BackupAndRestore` resumes.
    initial_step: int
    passed_steps: int  # steps of that epoch that were complete before this call
    passed_logs: Any  # the logs of the last of them, dict of str to float; or None
    steps_per_epoch: int | None  # None leaves the number to the data
    validation_steps: int | None  # the same
    validation_freq: Any  # int or list of int, as `fit` takes it
    shards: OptimizerShards | None  # None if each worker makes the whole update
    metrics_layout: StateLayout  # of the variables in `keras_metrics.metric_state`
    metrics_block: int  # the number of the call's block that holds them
    pauses: bool  # whether the parent may ask for a pause
    stop: bool  # whether to stop after one batch, since `on_train_begin` requested it
    # Of the model after `on_train_begin`, see `keras_models.plain_attributes`.
    attributes: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class EvaluateOrder(ModelOrder):
    """One `evaluate`. A worker's result is `Evaluated`."""

    data: Any  # `ArrayInput`, `StreamInput` or `PipelineInput`
    steps: int | None  # as `evaluate` takes it


@dataclasses.dataclass(frozen=True)
class Left:
    """Changes of the model by a pass of `evaluate` or `predict` on rank 0, as in one process.

    Of other ranks, only `steps` is set.
    """

    steps: int | None  # batches; None if Keras does not count them in the model
    # The values (`numpy.ndarray`) of the variables that the pass has changed, such as the states of
    # random layers, by place in `ModelOrder.layout`.
    changed: dict[int, Any]
    # Of the model, see `keras_models.plain_attributes`, if steps that run eagerly have changed any.
    attributes: tuple[dict[str, Any], ...] = ()
    seeds: Any = None  # see `Generation.drawn_seeds`
    runs_python: bool = False  # whether the model's traced steps run Python, see `parent.traced`


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A worker's result of an `EvaluateOrder`."""

    logs: dict[str, Any]  # result of `evaluate(return_dict=True)`; equal on all ranks
    values: Any  # result of `evaluate()`, a float or a list of float
    metrics: list[Any]  # this rank's part of the metrics' variables, `numpy.ndarray`s
    left: Left


@dataclasses.dataclass(frozen=True)
class PredictOrder(ModelOrder):
    """One `predict`. A worker's result is `Left`, besides the outputs that it has sent."""

    data: Any  # `ArrayInput`, `StreamInput` or `PipelineInput`
    steps: int | None  # as `predict` takes it


# ------------------------------------------------------------------------- custom loops
@dataclasses.dataclass(frozen=True)
class LoopData:
    """Data of a custom loop, which the parent reads."""

    # "dataset" if it can be iterated again and again, "iterator" if it yields tensors once,
    # "generator" if it yields arrays once.
    kind: str
    signature: Any  # nested structure of `tf.TensorSpec`, of one element
    cardinality: int  # number of elements, or TensorFlow's codes for endless and unknown


@dataclasses.dataclass(frozen=True)
class Terminal:
    """Properties of the user's output, for a worker whose prints the user sees."""

    is_terminal: dict[str, bool]  # whether "stdout" and "stderr" are terminals
    columns: int  # its width

    @classmethod
    def capture(cls) -> Terminal:
        """Returns the properties of this process's output."""
        # A daemon's streams are None; a notebook's streams may be any objects.
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        is_terminal = {name: bool(getattr(s, "isatty", bool)()) for name, s in streams.items()}
        return cls(is_terminal, shutil.get_terminal_size().columns)


@dataclasses.dataclass(frozen=True)
class LoopOrder:
    """One `@nano` call. A worker's result is a `LoopEnd`."""

    shipment: Any  # `shipping.objects.programs.Shipment`
    # The number of the call's block for the arrays of its pickles; None if they have none.
    array_block: int | None
    data: tuple[LoopData, ...]  # by number
    layout: StateLayout  # of `shipping.objects.identities.distinct_variables`
    state_block: int  # the number of the call's block that holds the state
    chance: Chance  # the random states, the same for all ranks
    terminal: Terminal
    summaries: bool  # as in `ModelOrder`


@dataclasses.dataclass(frozen=True)
class LoopEnd:
    """The end of a `@nano` function on one rank."""

    held: tuple[tuple[str, float], ...]  # the variables' names and norms
    divides: bool  # whether a call of a layer in the program was divided
    changes: dict[str, Any]  # `ProcessState.changes` of the call


# ------------------------------------------------------------------------ items of nanotf.map
@dataclasses.dataclass(frozen=True)
class TaskShipment:
    """A function of `nanotf.map`, in the form in which it is sent, and what all its items get."""

    whole: Any  # `packing.Pickled`, the function and the values of its keyword arguments
    names: tuple[str, ...]  # of the keyword arguments
    has_block: bool  # whether the order's first block, which all workers map, holds their arrays
    terminal: Terminal
    quiet: bool  # whether Keras's bars are quiet unless the function asks for them


@dataclasses.dataclass(frozen=True)
class ItemOrder:
    """Items of `nanotf.map`, for one worker, which runs those that it takes: see `item_pipes`.

    `messages.Returned` brings a result with large arrays.
    """

    # None if the worker has it from an earlier order. If not, the order's first descriptors are
    # those of the worker's pipes.
    task: TaskShipment | None
    indices: tuple[int, ...]
    seeds: tuple[int, ...]  # of each item, for all random number generators
    bodies: tuple[bytes, ...]  # of each item, its `packing.Pickled`
    # By index, where the arrays of an item lie in its block. The order's last blocks are those of
    # these items.
    buffers: dict[int, tuple[tuple[int, int], ...]]


@dataclasses.dataclass(frozen=True)
class ForgetTask:
    """The end of a `nanotf.map`: the worker drops the function. It does not answer."""


# ------------------------------------------------------------------- batches that readers read
@dataclasses.dataclass(frozen=True)
class ReadMoment:
    """The part of a call in which a batch is read. Random numbers depend on it."""

    # How many epochs of the dataset had ended when the pass began; -1 for the batches that Keras
    # looks at before it begins.
    epoch: int
    turn: int = 0  # counts the passes that began in this epoch


BEFORE = ReadMoment(-1)


@dataclasses.dataclass(frozen=True)
class DatasetOrder:
    """A dataset as it is now, for one reader, which does not answer.

    The order's descriptors are those of the blocks.
    """

    dataset: int  # its number in this call
    seed: int  # the call's
    nbytes: int  # the size of its pickle
    blocks: tuple[int, ...]  # their sizes in bytes: the pickle's, then those of its large arrays


@dataclasses.dataclass(frozen=True)
class ReadOrder:
    """One batch, for one reader, whose result is `BatchRead`.

    `messages.Returned` with the number of a slot brings a slot's memory when it is new.
    """

    dataset: int  # as in `DatasetOrder`
    index: int  # the argument of `__getitem__`
    moment: ReadMoment
    free: tuple[int, ...]  # slots that the parent needs no longer


@dataclasses.dataclass(frozen=True)
class BatchRead:
    """A batch. A slot is memory of the reader that the parent maps."""

    body: bytes  # its pickle
    # Offset and size in bytes of its large arrays in the slot
    places: tuple[tuple[int, int], ...] = ()
    slot: int = -1  # -1 if it has no large arrays
