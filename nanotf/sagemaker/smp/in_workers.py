"""A rank of a plain script, in a worker: the other end of `WorkersModel`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import keras_optimizers, values
from nanotf.compat.chance import Chance
from nanotf.compat.keras_common import tf_variable
from nanotf.console import logger
from nanotf.errors import ShippingError
from nanotf.parent.resume.callback_states import attributes_of
from nanotf.sagemaker.smp import memory, partitioned, runtime, step_report, step_seeds
from nanotf.sagemaker.smp.from_keras import KerasModel
from nanotf.sagemaker.smp.mailboxes.mailbox import Mailbox, MailboxSpec
from nanotf.shipping.objects import pickling

Array = np.ndarray[Any, Any]


@dataclasses.dataclass
class OptimizerState:
    """The state of an optimizer."""

    # The values of slots, by an attribute of the optimizer and a trainable variable's number.
    slots: dict[str, dict[int, Array]] = dataclasses.field(default_factory=dict)
    # Values of variables that an optimizer has before it is built.
    early: list[Array] = dataclasses.field(default_factory=list)
    # Of others that are no slots; None if they differ between partitions.
    late: list[Array] | None = dataclasses.field(default_factory=list)
    # The trainable variables, by their numbers among all; None before the first `fit`.
    trained: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The end of a rank's call."""

    result: Any  # of rank 0, what Keras's method returned; of `fit` the attributes of the `History`
    # By a variable's number, of those that this rank holds; after other methods than `fit`, only
    # those that the model's call writes. Only of the first copy of the model.
    values: dict[int, Array]
    state: OptimizerState | None  # of the same variables; only after `fit`
    # Of rank 0, for each callback its pickled attributes; None if they cannot travel.
    callbacks: list[bytes | None]
    chance: Chance | None  # of rank 0, after the call
    report: step_report.StepReport | None  # of `fit` in rank 0


def run_rank(
    rank: int,
    *,
    descriptors: Sequence[int],
    size: int,
    config: Mapping[str, Any],
    model: Any,
    compiled: Mapping[str, Any],
    optimizer: Any,
    state: OptimizerState,
    method: str,
    given: Mapping[str, Any],
    chance: Chance,
    earlier: int,
) -> RankResult:
    """Runs one of Keras's methods in this process, as a rank.

    Args:
        descriptors: the ends of the mailbox; see `MailboxSpec.fds`.
        config: for `smp.init`.
        model: the whole model, with the weights of the parent's.
        compiled: arguments of `compile` without the optimizer.
        optimizer: not built.
        earlier: for `step_seeds.earlier_calls`.
        state: of the whole model; before the first `fit`, `early` alone.
    """
    inbox, *outboxes = descriptors
    mailbox = Mailbox(MailboxSpec(rank, size, inbox, tuple(outboxes)))
    runtime.enter(mailbox)
    _private_at_first()  # cached in the first call, before its tensors
    try:
        runtime.init(dict(config))
        part = KerasModel(model)
        part.compile(optimizer=optimizer, **compiled)
        early = keras_optimizers.optimizer_variables(part.optimizer)  # not built: no slots
        if method == "fit":  # others have no use for slots
            _fill(part, state, early)
        chance.restore()  # last, so that no preparation draws from the script's state
        with runtime.setting(step_seeds.earlier_calls, earlier):
            result = getattr(part, method)(**given)
        return _ended(part, result, early, callbacks_of(given))
    finally:
        runtime.enter(None)  # the pool may give this worker to another call
        mailbox.close()


# The private bytes of this process before its first call: what TensorFlow has allocated came later.
_private_at_first = functools.cache(memory.private_bytes)


def _numbers(part: KerasModel, which: str) -> list[int]:
    """Returns the numbers, among the whole model's variables, of those that this rank holds."""
    whole = {id(tf_variable(v)): n for n, v in enumerate(getattr(part.original, which))}
    held = [whole.get(id(tf_variable(v))) for v in getattr(part, which)]
    return [number for number in held if number is not None]  # the others are metrics'


def _fill(part: KerasModel, state: OptimizerState, early: Sequence[Any]) -> None:
    """Builds the optimizer of a rank, and gives it its part of a state."""
    for variable, value in zip(early, state.early, strict=True):
        variable.assign(value)
    part.optimizer.build(part.trainable_variables)
    if not state.slots and not state.late:  # before the first `fit`, new slots are right
        return
    numbers = _numbers(part, "trainable_variables")
    for name, slots in keras_optimizers.optimizer_slots(part.optimizer).items():
        for slot, number in zip(slots, numbers, strict=True):
            if slot is not None:
                values.share(tf_variable(slot), state.slots[name][number])
    # The steps' tensors will not all lie where those of the last call did.
    values.return_freed(memory.private_bytes() - _private_at_first())
    for variable, value in zip(_late(part.optimizer, early), state.late or (), strict=True):
        variable.assign(value)


def _late(optimizer: Any, early: Sequence[Any]) -> list[Any]:
    """Returns the variables of a built optimizer that are neither slots nor early ones."""
    known = set(map(id, early))
    return [v for v in keras_optimizers.variables_beside_slots(optimizer) if id(v) not in known]


def _ended(
    part: KerasModel, result: Any, early: Sequence[Any], callbacks: Sequence[Any]
) -> RankResult:
    held_values: dict[int, Array] = {}
    state = None
    trained = isinstance(result, tf.keras.callbacks.History)
    if runtime.dp_rank() == 0:  # the others have copies of the same model
        variables = [tf_variable(v) for v in part.original.variables]
        written = partitioned.begun(part).written
        held_values = {
            number: values.array_of(variables[number])
            for number in _numbers(part, "variables")
            if trained or id(variables[number].handle) in written
        }
        state = _state(part, early) if trained else None
    found = step_report.last_report() if trained else None  # all ranks must call it
    if runtime.rank() > 0:  # the rest is equal on all ranks, or rank 0's alone
        return RankResult(None, held_values, state, [], None, None)
    if trained:
        result = {"history": result.history, "epoch": result.epoch, "params": result.params}
    own = [_attributes(callback) for callback in callbacks]
    return RankResult(result, held_values, state, own, Chance.capture(), found)


def _state(part: KerasModel, early: Sequence[Any]) -> OptimizerState:
    """Returns the state of a rank's optimizer."""
    numbers = _numbers(part, "trainable_variables")
    return OptimizerState(
        {
            name: {
                number: values.array_of(tf_variable(slot))
                for number, slot in zip(numbers, slots, strict=True)
                if slot is not None
            }
            for name, slots in keras_optimizers.optimizer_slots(part.optimizer).items()
        },
        [v.numpy() for v in early],
        [v.numpy() for v in _late(part.optimizer, early)],
    )


def _attributes(callback: Any) -> bytes | None:
    """Returns a callback's attributes, pickled, without those that belong to the call."""
    try:
        return pickling.dumps(dict(attributes_of(callback)))
    except ShippingError as error:
        logger.warning(
            "%s stays as it was before the call: its attributes cannot be sent. %s",
            type(callback).__name__,
            error,
        )
        return None


def callbacks_of(given: Mapping[str, Any]) -> list[Any]:
    """Returns the callbacks among the arguments of a call."""
    flat = tf.nest.flatten(given.get("callbacks"))
    return [callback for callback in flat if callback is not None]
