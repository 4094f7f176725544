"""Jobs that the parent ships to the workers, and their results."""

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
    """Returns the epoch or batch (None for a hook without one) and the logs (or None) of a call."""
    values = [*arguments, *named.values()]
    index = values.pop(0) if hook in EPOCH_HOOKS + BATCH_HOOKS else None
    return index, values[0] if values else None


@dataclasses.dataclass(frozen=True)
class ModelOrder:
    """Base of the calls of a model's methods.

    Args:
        heap: bytes, the model, pickled by `shipping.objects.heap.dump_model`.
        trace: int, see `parent.traced.TracedModel.number`. If it and the bytes are equal, a worker
            reuses the model that it has, and its traced functions.
        specs: nested structure of `tf.TensorSpec`, of one global batch.
        layout: `StateLayout` of the model's variables, then, in `FitOrder`, the optimizer's.
        captured: tuple of int, the numbers in the heap of the variables that come last there.
        state_block: int, the number of the call's block that holds the state.
        events: frozenset of str, hooks that rank 0 reports.
        waits: frozenset of str, hooks at which all ranks wait for the parent's answer.
        chance: `Chance`, the random states, the same for all ranks.
        seeding: int, see `eager_context.seeding`.
        terminal: `Terminal`.
        quiet: bool, whether rank 0's prints stay out of it.
        unreset: dict of int to `numpy.ndarray`, by the place in `keras_names.metric_state`: values
            of metrics that Keras has not built yet, and so does not reset before the first epoch.
        summaries: bool, whether the parent has a default writer of summaries.
    """

    heap: bytes
    trace: int
    specs: Any
    layout: StateLayout
    captured: tuple[int, ...]
    state_block: int
    events: frozenset[str]
    waits: frozenset[str]
    chance: Chance
    seeding: int
    terminal: Terminal
    quiet: bool
    unreset: dict[int, Any]
    summaries: bool


@dataclasses.dataclass(frozen=True)
class FitOrder(ModelOrder):
    """One `fit`. A worker's result is a bool, see `Left.runs_python`.

    Args:
        train: `ArrayInput` or `StreamInput`.
        validation: same, or None.
        epochs: int, index of the epoch after the last.
        initial_epoch: int.
        steps_per_epoch: int or None.
        validation_steps: int or None.
        validation_freq: int or list of int, as `fit` takes it.
        initial_step: int, the first step in that epoch; 0 unless Keras 2's `BackupAndRestore`
            resumes.
        passed_steps: int, steps of that epoch that were complete before this call.
        passed_logs: dict of str to float or None, the logs of the last of them.
        shards: `OptimizerShards`, or None if each worker makes the whole update.
        asks: frozenset of str, the batch hooks at which workers store their state without a
            request.
        metrics_layout: `StateLayout` of the variables in `keras_names.metric_state`.
        metrics_block: int, the number of the call's block that holds them.
        pauses: bool, whether the parent may ask for a pause.
        stop: bool, whether to stop after one batch, since `on_train_begin` requested it.
        attributes: see `keras_names.plain_attributes`, those of the model after `on_train_begin`.
    """

    train: Any
    validation: Any
    epochs: int
    initial_epoch: int
    initial_step: int
    passed_steps: int
    passed_logs: Any
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_freq: Any
    shards: OptimizerShards | None
    asks: frozenset[str]
    metrics_layout: StateLayout
    metrics_block: int
    pauses: bool
    stop: bool
    attributes: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class EvaluateOrder(ModelOrder):
    """One `evaluate`. A worker's result is `Evaluated`.

    Args:
        data: `ArrayInput` or `StreamInput`.
        steps: int or None, as `evaluate` takes it.
    """

    data: Any
    steps: int | None


@dataclasses.dataclass(frozen=True)
class Left:
    """Changes of the model by a pass of `evaluate` or `predict` on rank 0, as in one process.

    Args:
        steps: int or None, batches, if Keras counts them in the model.
        changed: dict of int to `numpy.ndarray`, the values of the variables that the pass has
            changed, such as the states of random layers, by place in `ModelOrder.layout`.
        attributes: see `keras_names.plain_attributes`, those of the model, if steps that run
            eagerly have changed any.
        seeds: see `Generation.drawn_seeds`.
        runs_python: bool, whether the model's traced steps run Python code, see `parent.traced`.
    """

    steps: int | None
    changed: dict[int, Any]
    attributes: tuple[dict[str, Any], ...] = ()
    seeds: Any = None
    runs_python: bool = False


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A worker's result of an `EvaluateOrder`.

    Args:
        logs: dict of str to float, result of `evaluate(return_dict=True)`; equal on all ranks.
        values: float or list of float, result of `evaluate()`.
        metrics: list of `numpy.ndarray`, this rank's part of the metrics' variables.
        left: `Left`.
    """

    logs: dict[str, Any]
    values: Any
    metrics: list[Any]
    left: Left


@dataclasses.dataclass(frozen=True)
class PredictOrder(ModelOrder):
    """One `predict`. A worker's result is `Left`, besides the outputs that it has sent.

    Args:
        data: `ArrayInput` or `StreamInput`.
        steps: int or None, as `predict` takes it.
    """

    data: Any
    steps: int | None


# ------------------------------------------------------------------------- custom loops
@dataclasses.dataclass(frozen=True)
class LoopData:
    """Data of a custom loop, which the parent reads.

    Args:
        kind: str, "dataset" if it can be iterated again and again, "iterator" if it yields
            tensors once, "generator" if it yields arrays once.
        signature: nested structure of `tf.TensorSpec`, of one element.
        cardinality: int, number of elements, or TensorFlow's codes for endless and unknown.
    """

    kind: str
    signature: Any
    cardinality: int


@dataclasses.dataclass(frozen=True)
class Terminal:
    """Properties of the user's output that rank 0 needs.

    Args:
        is_terminal: dict of str to bool, whether "stdout" and "stderr" are terminals.
        columns: int, its width.
    """

    is_terminal: dict[str, bool]
    columns: int

    @classmethod
    def capture(cls) -> Terminal:
        """Returns the properties of this process's output."""
        # A daemon's streams are None; a notebook's streams may be any objects.
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        is_terminal = {name: bool(getattr(s, "isatty", bool)()) for name, s in streams.items()}
        return cls(is_terminal, shutil.get_terminal_size().columns)


@dataclasses.dataclass(frozen=True)
class LoopOrder:
    """One `@nano` call. A worker's result is a `LoopEnd`.

    Args:
        shipment: `shipping.objects.programs.Shipment`.
        array_block: int or None, the number of the call's block for the arrays of its pickles.
        data: tuple of `LoopData`, by number.
        layout: `StateLayout` of `shipping.objects.identities.distinct_variables`.
        state_block: int, the number of the call's block that holds the state.
        chance: `Chance`, the random states, the same for all ranks.
        terminal: `Terminal`.
        summaries: bool, as in `ModelOrder`.
    """

    shipment: Any
    array_block: int | None
    data: tuple[LoopData, ...]
    layout: StateLayout
    state_block: int
    chance: Chance
    terminal: Terminal
    summaries: bool


@dataclasses.dataclass(frozen=True)
class LoopEnd:
    """The end of a `@nano` function on one rank.

    Args:
        held: tuple of tuple of str and float, the variables' names and norms.
        divides: bool, whether a call of a layer in the program was divided.
        changes: dict, `ProcessState.changes` of the call.
    """

    held: tuple[tuple[str, float], ...]
    divides: bool
    changes: dict[str, Any]


# ------------------------------------------------------------------------ items of nanotf.map
@dataclasses.dataclass(frozen=True)
class TaskShipment:
    """A function of `nanotf.map`, in the form in which it is sent.

    Args:
        whole: `packing.Pickled`, the function and the values of its keyword arguments.
        names: tuple of str, the names of these.
        has_block: bool, whether the call's first block, which all workers map, holds their arrays.
    """

    whole: Any
    names: tuple[str, ...]
    has_block: bool


@dataclasses.dataclass(frozen=True)
class ItemOrder:
    """One item of `nanotf.map`, for one worker.

    `messages.Returned` brings a result with large arrays. For any other, the worker's result is
    `packing.Pickled`; for such a result it is None.

    Args:
        task: `TaskShipment`, or None if the worker has it from an earlier item.
        whole: `packing.Pickled`, the item.
        has_block: bool, whether the call's last block holds its arrays.
        seed: int, for all random number generators.
        terminal: `Terminal`.
    """

    task: TaskShipment | None
    whole: Any
    has_block: bool
    seed: int
    terminal: Terminal


@dataclasses.dataclass(frozen=True)
class ForgetTask:
    """The end of a `nanotf.map`: the worker drops the function. It does not answer."""
