"""Splits the arguments of a step into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.errors import InvalidArgumentError


@dataclass(frozen=True)
class Slicing:
    """Splits arguments; made by `smp.step`."""

    signature: inspect.Signature  # of the step's function
    whole: frozenset[str]  # names of arguments that are not split
    axes: Mapping[str, int]  # by an argument's name, the axis along which it is split; else 0

    def check(self) -> None:
        """Raises `InvalidArgumentError` if it names an argument that the function lacks."""
        for option, names in (("non_split_inputs", self.whole), ("input_split_axes", self.axes)):
            for name in names:
                if name not in self.signature.parameters:
                    raise InvalidArgumentError(
                        f"{option} must name arguments of the step's function. Received: "
                        f"{name!r}, and the function has {list(self.signature.parameters)}."
                    )

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the positional and keyword arguments of each microbatch.

        Raises:
            InvalidArgumentError: A batch is not divisible by `count`.
        """
        found = []
        for number in range(count):
            bound = self.signature.bind(*args, **kwargs)  # anew: its arguments are replaced
            for name, value in bound.arguments.items():
                if name not in self.whole:
                    axis = self.axes.get(name, 0)
                    bound.arguments[name] = _part(value, name, count, number, axis)
            found.append((bound.args, bound.kwargs))
        return found


def _part(value: Any, name: str, count: int, number: int, axis: int) -> Any:
    if hasattr(value, "smp_slice"):
        return value.smp_slice(count, number, axis)
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return _composite_rows(value, name, count, number, axis)
    if isinstance(value, (tf.Tensor, np.ndarray)):
        return _rows(tf.convert_to_tensor(value), name, count, number, axis)
    if isinstance(value, Mapping):
        return {key: _part(item, name, count, number, axis) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # A namedtuple takes its fields one by one.
        return type(value)(*(_part(item, name, count, number, axis) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(_part(item, name, count, number, axis) for item in value)
    return value  # what is no data, such as a flag, goes whole to each microbatch


def _composite_rows(value: Any, name: str, count: int, number: int, axis: int) -> Any:
    """Returns a microbatch of a ragged or a sparse tensor."""
    if axis != 0:
        raise InvalidArgumentError(
            "Ragged and sparse tensors are split along their first axis. Received: argument "
            f"{name!r}, a {type(value).__name__}, to be split along axis {axis}. Name it in "
            "non_split_inputs, or pass a dense tensor."
        )
    if isinstance(value, tf.RaggedTensor):
        each = _divisible(value.nrows(), count) // count
        return value[number * each : (number + 1) * each]
    shape = tf.cast(value.dense_shape, tf.int64)
    each = _divisible(shape[0], count) // count
    begin = tf.concat([[number * each], tf.zeros_like(shape[1:])], 0)
    return tf.sparse.slice(value, begin, tf.concat([[each], shape[1:]], 0))


def _divisible(length: Any, count: int) -> Any:
    """Returns a length, once it is known in an execution that it is divisible."""
    divisible = tf.debugging.assert_equal(
        length % count,
        tf.zeros_like(length),
        "The batch size must be divisible by the number of microbatches.",
    )
    with tf.control_dependencies([divisible]):
        return tf.identity(length)


def _rows(tensor: Any, name: str, count: int, number: int, axis: int) -> Any:
    rank = tensor.shape.rank
    if rank == 0 and axis == 0:  # a number, such as one of NumPy's, which TensorFlow converts
        return tensor
    if rank is not None and not -rank <= axis < rank:
        raise InvalidArgumentError(
            "A step splits each tensor among its arguments into microbatches along one axis. "
            f"Received: argument {name!r} of shape {tensor.shape}, to be split along axis {axis}. "
            "Name it in non_split_inputs, or its axis in input_split_axes."
        )
    length = None if rank is None else tensor.shape[axis]
    if length is not None and length % count:
        raise InvalidArgumentError(
            "The batch size must be divisible by the number of microbatches. Received: argument "
            f"{name!r} with {length} rows, microbatches={count}. Use "
            "dataset.batch(..., drop_remainder=True), or other numbers."
        )
    if length is None:  # known in each execution alone
        length = _divisible(tf.shape(tensor)[axis], count)
    each = length // count
    if axis == 0:
        return tensor[number * each : (number + 1) * each]
    return tf.gather(tensor, tf.range(number * each, (number + 1) * each), axis=axis)
