"""Copies of the model: averages of their gradients, and equal values at the begin.

Every process of a dp_group sends its arrays to the others, in one block that all map, and sums up
all copies. All do so in the order of ranks, so all get the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat.keras_common import tf_variable
from nanotf.compat.step_errors import python_operation
from nanotf.errors import CollectiveError
from nanotf.sagemaker.smp import runtime

Array = np.ndarray[Any, Any]

_equal: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose weights `equalize` has made equal


def average_over_replicas(arrays: Sequence[Array]) -> list[Array]:
    """Averages arrays over the copies of the model: over the processes of this dp_group.

    All of them call this in the same order. The sum is formed in the order of ranks, so all get
    the same bits. Usable in `tf.numpy_function`.

    Args:
        arrays: of floating-point numbers, of the same shapes on all ranks.

    Returns:
        The averages; with one copy, the arguments.

    Raises:
        CollectiveError: Another rank averages arrays of other types or shapes, or does not call.
        WorkerDied: A rank has died.
    """
    parts = gather_over_replicas(arrays)
    for other, theirs in zip(runtime.place().dp_group, parts, strict=True):
        if [(a.dtype, a.shape) for a in theirs] != [(a.dtype, a.shape) for a in arrays]:
            raise CollectiveError(
                "All copies of the model must average the same arrays. Received: "
                f"{_like(arrays)} on rank {runtime.rank()}, {_like(theirs)} on rank {other}."
            )
    if len(parts) == 1:
        return parts[0]
    return [_mean(copies) for copies in zip(*parts, strict=True)]


def _like(arrays: Sequence[Array]) -> str:
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)


def _mean(copies: Sequence[Array]) -> Array:
    # 16-bit floats are summed with 32 bits and rounded once, as in `Group.all_reduce`.
    wide = np.float32 if copies[0].dtype.itemsize == 2 else copies[0].dtype
    total = copies[0].astype(wide)  # always a copy: receivers share the sender's block
    for copy in copies[1:]:
        total += copy
    total /= len(copies)
    return total.astype(copies[0].dtype, copy=False)


def gather_over_replicas(arrays: Sequence[Array]) -> list[list[Array]]:
    """Returns each copy's arrays, in the order of ranks.

    Args:
        arrays: of any shapes, which may differ between copies.

    Raises:
        CollectiveError, WorkerDied: As `average_over_replicas`.
    """
    group = runtime.get_dp_group()
    what = f"an average over the dp_group {group}"
    return runtime.gather(group, "smp: copies of the model", arrays, what)


def equalize(models: Iterable[Any]) -> None:
    """Gives the weights of each model the values of the first copy, once.

    So a script may set another seed on each copy, for its data. Runs eagerly; all copies call this
    with the same models.

    Args:
        models: built.
    """
    for model in [model for model in models if model not in _equal]:
        _equal.add(model)
        if runtime.has_replicas():
            for variable in model.weights:  # without the states of random generators
                _equalize(variable)


def average_states(models: Iterable[Any], written: Callable[[Any], bool]) -> None:
    """Makes operations that average the states of models, such as moving averages, over the copies.

    Args:
        models: those that a step calls.
        written: returns True for a variable that the step writes.

    Raises:
        CollectiveError: When they run: a state that is no floating-point number has parted.
    """
    if not runtime.has_replicas():
        return
    found = [tf_variable(v) for model in models for v in model.non_trainable_weights]
    states = [variable for variable in found if written(variable)]
    if not states:
        return
    names = [state.name for state in states]

    def average(*values: Any) -> list[Any]:
        arrays = [np.asarray(value) for value in values]
        means = iter(average_over_replicas([a for a in arrays if _is_float(a)]))
        others = gather_over_replicas([a for a in arrays if not _is_float(a)])
        for copies in zip(*others, strict=True):
            if not all(np.array_equal(copies[0], copy) for copy in copies):
                raise CollectiveError(_PARTED.format(names=", ".join(names)))
        return [next(means) if _is_float(array) else array for array in arrays]

    read = [state.read_value() for state in states]
    for state, mean in zip(states, python_operation(average, read, states), strict=True):
        state.assign(mean)


_PARTED = (
    "Copies of a model have the same state: floating-point numbers are averaged, all others are "
    "equal. Received: values that differ between copies, in one of {names}. Keep such a state "
    "outside the model, or as a floating-point number."
)


def _is_float(array: Array) -> bool:
    return bool(tf.as_dtype(array.dtype).is_floating)


def _equalize(variable: Any) -> None:
    first, *others = runtime.place().dp_group
    box, tag = runtime.mailbox(), "smp: first values"
    if runtime.rank() == first:
        box.send_to_all(others, tag, [np.asarray(variable)])
    else:
        (value,) = box.receive(first, tag, f"the first value of {variable.name}")
        variable.assign(value)
