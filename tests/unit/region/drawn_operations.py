"""Draws operations with random inputs, builds them for any number of rows, and computes them.

A `Drawing` is a graph in small: tensors of many states, and operations on them that TensorFlow
accepts. It is drawn once, for a large number of rows, and is then built again for others.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from drawn_arguments import ATTRIBUTES, RANKS
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library, op_def_registry

# Rows of these shapes and kinds of numbers.
INPUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "table": ((4,), tf.float64),
    "numbers": ((), tf.float64),
    "single": ((4,), tf.float32),
    "sequences": ((3, 4), tf.float64),
    "matrices": ((3, 3), tf.float64),
    "images": ((4, 4, 2), tf.float32),
    "colors": ((4, 4, 3), tf.float32),
    "volumes": ((4, 4, 4, 2), tf.float32),
    "waves": ((4, 4), tf.complex64),
    "ids": ((), tf.int32),
    "pairs": ((2,), tf.int32),
    "counts": ((4,), tf.int64),
    "flags": ((4,), tf.bool),
    "words": ((), tf.string),
}
# Inputs without rows, whose values a graph does not show.
WHOLE_INPUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "whole number": ((), tf.int32),
    "weights": ((4,), tf.float64),
    "single weights": ((4,), tf.float32),
    "square": ((4, 4), tf.float64),
}


def placeholders(rows: int) -> dict[str, Any]:
    """Makes the inputs in the default graph."""
    return {
        name: tf.compat.v1.placeholder(dtype, (rows, *shape) if name in INPUTS else shape)
        for name, (shape, dtype) in {**INPUTS, **WHOLE_INPUTS}.items()
    }


def values_of_inputs(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Returns the inputs of a batch."""
    draw = np.random.default_rng(seed)
    found = {}
    for name, (shape, dtype) in {**INPUTS, **WHOLE_INPUTS}.items():
        size = (rows, *shape) if name in INPUTS else shape
        draw = draw if name in INPUTS else np.random.default_rng(7)
        if dtype == tf.string:
            value: Any = np.array([f"{n}.5" for n in draw.integers(0, 9, size)], object)
        elif dtype == tf.bool:
            value = draw.integers(0, 2, size) > 0
        elif dtype.is_integer:
            value = np.asarray(draw.integers(0, 3, size))
        else:
            value = draw.uniform(0.1, 2.0, size)
        found[name] = value.astype(dtype.as_numpy_dtype)
    return found


def _numbers(x: dict[str, Any]) -> Iterator[Any]:
    """Yields tensors made from the number of rows."""
    shape = tf.shape(x["table"])
    n = shape[0]
    real = tf.cast(n, tf.float64)
    yield from (n, n + 1, n * 2, n // 2, n % 2, tf.minimum(n, 3), n - 1, shape, [n, 2, 2], [2, n])
    yield from (real, 1.0 / real, real * real, tf.cast(n, tf.float32), tf.cast(n, tf.int64))
    yield from (tf.range(n), tf.fill([2], n), tf.fill([n, 4], real), tf.cast(n - 1, tf.bool))
    yield from (tf.stack([0, n]), tf.stack([n, 4, 4, 2]), tf.stack([4, n]), tf.stack([-1, n]))
    yield from (n * x["whole number"], [n * x["whole number"]], [2, n * 2], [2 * n, 2], [4 * n])


def _sums(x: dict[str, Any]) -> Iterator[Any]:
    """Yields sums and means over rows, zeros among them."""
    for name in ("table", "numbers", "single", "images", "sequences", "ids", "counts"):
        yield tf.reduce_sum(x[name], 0)
    for name in ("table", "numbers", "single", "matrices"):
        yield tf.reduce_mean(x[name], 0)
    yield from (tf.reduce_sum(x["table"]), tf.reduce_mean(x["table"]), tf.reduce_mean(x["single"]))
    yield from (tf.reduce_sum(x["single"], 0, keepdims=True), tf.reduce_sum(x["pairs"], 0))
    yield tf.reduce_sum(tf.zeros_like(x["table"]), 0)
    yield tf.reduce_sum(x["waves"], 0)


def _whole(x: dict[str, Any]) -> Iterator[Any]:
    """Yields tensors without rows."""
    draw = np.random.default_rng(3)
    for dtype in (np.float64, np.float32):
        for shape in (
            (),
            (4,),
            (2,),
            (3,),
            (4, 4),
            (4, 3),
            (3, 3),
            (1, 4),
            (2, 2, 2, 2),
            (4, 4, 2),
        ):
            yield tf.constant(draw.uniform(0.2, 2.0, shape), dtype)
        yield tf.zeros((4,), dtype)
        yield tf.constant(draw.uniform(0.2, 1.0, (1, 8)), dtype)
        yield tf.constant(draw.uniform(0.2, 2.0, (2, 2, 2, 2, 2)), dtype)
        yield tf.constant(draw.uniform(0.2, 2.0, (2, 2, 2)), dtype)
    for value in (0, 1, 2, 3, -1, 4, [0], [1], [1, 1], [2, 2], [0, 1], [-1, 2], [-1, 4], [1, 0, 2]):
        yield tf.constant(value, tf.int32)
    for value in ([1, 0], [0, 2, 1], [0, 3, 1, 2], [[0, 0], [1, 1]], [[0, 0], [0, 0]], [2, 1], [3]):
        yield tf.constant(value, tf.int32)
    for value in ([0, 0], [1, 2], [-1, 3], [-1, 1], [[0], [1]], [[1, 0]], [-1], [4, 4], [2, 2, 1]):
        yield tf.constant(value, tf.int32)
    yield from (
        tf.constant(1, tf.int64),
        tf.constant([1, 2], tf.int64),
        tf.constant([1, 1], tf.int64),
    )
    yield from (tf.constant(True), tf.constant([True, False, True, False]), tf.constant("1.5"))
    yield from (tf.zeros((0,), tf.float32), tf.constant([1j, 2, 3, 4], tf.complex64))


def _placed(x: dict[str, Any]) -> Iterator[Any]:
    """Yields rows along other axes, or several for each row of the batch."""
    yield from (tf.transpose(x["table"]), tf.transpose(x["single"]), tf.transpose(x["counts"]))
    yield from (tf.reshape(x["table"], (-1, 2)), tf.reshape(tf.transpose(x["table"]), (-1,)))
    yield from (tf.reshape(x["images"], (-1, 4, 2)), tf.reshape(x["images"], (-1, 2, 4, 2)))
    yield tf.reshape(x["images"], (-1, 2, 2, 2))  # four for each
    yield tf.reshape(tf.transpose(x["images"], (1, 0, 2, 3)), (-1, 4, 2))
    yield tf.reshape(
        tf.transpose(tf.reshape(x["images"], (-1, 4, 2, 2, 2)), (1, 0, 2, 3, 4)), (-1, 2, 2, 2)
    )
    yield from (tf.transpose(x["matrices"], (1, 0, 2)), tf.transpose(x["images"], (1, 2, 3, 0)))
    yield from (tf.transpose(x["images"], (1, 0, 2, 3)), tf.transpose(x["matrices"], (1, 2, 0)))
    yield from (tf.transpose(x["pairs"]), tf.reshape(x["pairs"], (-1,)), x["pairs"][:, :1])
    yield from (tf.zeros_like(x["table"]), tf.zeros_like(x["single"]), x["table"][:, :1])
    yield from (tf.tile(x["single"][:, :1], [1, 8]), tf.transpose(x["flags"]), x["flags"][:, 0])
    yield from (
        tf.matmul(x["matrices"], x["matrices"], transpose_b=True) + tf.eye(3, dtype=tf.float64),
    )
    yield tf.tile(tf.constant([[0, 1]]), tf.stack([tf.shape(x["table"])[0], 1]))


def _lists(x: dict[str, Any]) -> Iterator[Any]:
    """Yields lists of tensors of four numbers, or of rows with four numbers."""
    n, raw = tf.shape(x["table"])[0], tf.raw_ops
    four = tf.constant([4])
    yield raw.TensorListFromTensor(
        tensor=tf.transpose(x["sequences"], (1, 0, 2)), element_shape=[-1, 4]
    )
    yield raw.TensorListFromTensor(tensor=tf.ones((3, 4), tf.float64), element_shape=four)
    yield raw.TensorListFromTensor(tensor=x["table"], element_shape=four)
    yield raw.TensorListReserve(element_shape=four, num_elements=n, element_dtype=tf.float64)
    yield raw.TensorListReserve(element_shape=four, num_elements=3, element_dtype=tf.float64)
    yield raw.TensorListReserve(element_shape=[n, 4], num_elements=3, element_dtype=tf.float64)
    yield raw.EmptyTensorList(element_shape=four, max_num_elements=9, element_dtype=tf.float64)
    yield raw.TensorListPushBack(
        input_handle=raw.EmptyTensorList(
            element_shape=four, max_num_elements=n, element_dtype=tf.float64
        ),
        tensor=tf.reduce_mean(x["table"], 0),
    )


_REUSED = 0.2  # the part of results that others may take
_OF_IMAGES = 4  # of this rank, or more, tensors are images, and have 32 bits
_TYPES = (tf.float64, tf.float32, tf.int32, tf.int64, tf.bool, tf.string, tf.complex64)


_REFUSED = (
    tf.errors.OpError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    NotImplementedError,
)


@dataclasses.dataclass
class Drawn:
    """An operation with the places of its inputs in a `Drawing`."""

    kind: str
    inputs: list[int | list[int]]
    attributes: dict[str, Any]
    results: range  # the places of its outputs

    first: Any = None  # the `tf.Operation` that was made first

    def made(self, tensors: list[Any]) -> list[Any]:
        """Makes the operation in the default graph, or computes it in eager code."""
        if self.first is None:
            arguments = op_def_registry.get(self.kind).input_arg
            given = {
                argument.name: [tensors[i] for i in place]
                if isinstance(place, list)
                else tensors[place]
                for argument, place in zip(arguments, self.inputs, strict=True)
            }
            made = op_def_library._apply_op_helper(self.kind, **given, **self.attributes)[2]
            self.first = made
            return list(made.outputs)
        inputs = [tensors[i] for place in self.inputs for i in np.ravel(place)]
        if any(each is None for each in inputs):
            raise ValueError("an input cannot be made")
        if tf.executing_eagerly():
            return execute.execute(
                self.kind, len(self.results), inputs, self._in_numbers(), context.context()
            )
        types = [t.dtype for t in self.first.outputs]
        attributes = dict(self.first.node_def.attr)
        graph = tf.compat.v1.get_default_graph()
        return list(graph.create_op(self.kind, inputs, types, attrs=attributes).outputs)

    def _in_numbers(self) -> Any:
        """Returns the attributes as eager code takes them."""
        if self._known is None:
            found: list[Any] = []
            for attribute in self.first.op_def.attr:
                value = self.first.get_attr(attribute.name)
                listed = value if isinstance(value, list) else [value]
                listed = [getattr(each, "as_datatype_enum", each) for each in listed]
                listed = [tf.TensorShape(v) if hasattr(v, "unknown_rank") else v for v in listed]
                found += [attribute.name, listed if isinstance(value, list) else listed[0]]
            self._known = tuple(found)
        return self._known

    _known: Any = None
    is_lost: bool = False  # whether TensorFlow refuses it for other numbers of rows


class Drawing:
    """Tensors of many states, and operations on them."""

    def __init__(self, seed: int) -> None:
        self.operations: list[Drawn] = []
        self._random = random.Random(seed)
        self._known: list[Any] = []  # the tensors' shapes
        self._numbers = range(0)  # the places of tensors made from the number of rows
        self._pool: dict[Any, list[int]] = {}  # by type, the places of tensors to choose from

    def tensors_of(self, inputs: dict[str, Any]) -> list[Any]:
        """Builds the tensors that all operations may take, in the default graph."""
        made: list[Any] = list(inputs.values())
        for group in (_whole, _numbers, _sums, _placed, _lists):
            first = len(made)
            made += map(tf.convert_to_tensor, group(inputs))
            if group is _numbers:
                self._numbers = range(first, len(made))
        return made

    def build(self, inputs: dict[str, Any]) -> list[Any]:
        """Builds all operations again; None for the results of one that refuses these shapes."""
        tensors = self.tensors_of(inputs)
        for drawn in self.operations:
            try:
                tensors += [None] * len(drawn.results) if drawn.is_lost else drawn.made(tensors)
            except _REFUSED:
                tensors += [None] * len(drawn.results)
        return tensors

    def forget_missing(self, tensors: list[Any]) -> None:
        """Makes operations without results of those whose results are None."""
        for drawn in self.operations:
            drawn.is_lost = any(tensors[place] is None for place in drawn.results)

    def draw(self, kind: str, tensors: list[Any], number: int, tries: int) -> int:
        """Adds operations of a kind that TensorFlow accepts; returns how many."""
        found = 0
        for _ in range(tries):
            if found == number:
                break
            if not self._known:
                self._known = [_shape_of(t) for t in tensors]
                for place, tensor in enumerate(tensors):
                    self._pool.setdefault(tensor.dtype, []).append(place)
            drawn = self._drawn(kind, tensors)
            try:
                made = [] if drawn is None else drawn.made(tensors)
                known = [_shape_of(t) for t in made]
            except _REFUSED:
                continue
            if drawn is not None:
                drawn.results = range(len(tensors), len(tensors) + len(made))
                tensors += made
                self._known += known
                for place in drawn.results:
                    if self._random.random() < _REUSED:
                        self._pool.setdefault(tensors[place].dtype, []).append(place)
                self.operations.append(drawn)
                found += 1
        return found

    def _drawn(self, kind: str, tensors: list[Any]) -> Drawn | None:
        definition = op_def_registry.get(kind)
        types: dict[str, Any] = {}
        attributes: dict[str, Any] = {}
        special = {**ATTRIBUTES[""], **ATTRIBUTES.get(kind, {})}
        used = {a.type_attr for a in definition.input_arg}
        used |= {a.number_attr or a.type_list_attr for a in definition.input_arg}
        for attribute in definition.attr:
            name = attribute.name
            if name in used and attribute.type == "type":
                allowed = [tf.as_dtype(t) for t in attribute.allowed_values.list.type]
                types[name] = self._type(kind, allowed or list(_TYPES))
            elif name in used:
                several = attribute.type != "list(type)"
                types[name] = self._random.choice(special["N"]) if several else 1
            else:
                attributes[name] = self._random.choice(special.get(name, (None,)))
        inputs: list[int | list[int]] = []
        like: list[tuple[int | None, ...]] = []  # the shapes of the inputs so far
        ranks = RANKS.get(kind, ())
        for place, argument in enumerate(definition.input_arg):
            count = types.get(argument.number_attr or argument.type_list_attr, 0)
            if argument.type_list_attr:
                dtype = tf.float64
            else:
                dtype = types[argument.type_attr] if argument.type_attr else argument.type
            rank = ranks[place] if place < len(ranks) else None
            places = [
                i
                for i in self._pool.get(tf.as_dtype(dtype), ())
                if rank in (None, _rank(self._known[i]))
            ]
            if not places:
                return None
            near = [shape for shape in like if rank in (None, len(shape))]
            chosen = [self._place(places, self._random.choice(near) if near else None)]
            like += [self._known[chosen[0]]] if self._known[chosen[0]] is not None else []
            while len(chosen) < count:
                chosen.append(self._place(places, self._known[chosen[0]]))
            inputs.append(chosen if count else chosen[0])
        return Drawn(kind, inputs, attributes, range(0))

    def _type(self, kind: str, allowed: list[Any]) -> Any:
        choice = [t for t in _TYPES if t in allowed]
        if max([rank or 0 for rank in RANKS.get(kind, ())], default=0) >= _OF_IMAGES:
            choice = [t for t in choice if t in (tf.float32, tf.int32)]
        elif self._random.random() < 0.6:
            choice = [t for t in choice if t == tf.float64] or choice
        return self._random.choice(choice or [tf.variant])

    def _place(self, places: list[int], like: Any) -> int:
        """Chooses a tensor, often one of the shape, or of the rank, of another."""
        chance = self._random.random()
        if like is not None and chance < 0.4:
            near = [place for place in places if self._known[place] == like]
        elif like is not None and chance < 0.55:
            near = [place for place in places if _rank(self._known[place]) == len(like)]
        else:
            near = []
        chosen = self._random.choice(near or places)
        if chosen in self._numbers and self._random.random() < 0.6:  # most operations refuse them
            chosen = self._random.choice(near or places)
        return chosen


def _shape_of(tensor: Any) -> tuple[int | None, ...] | None:
    """Returns a shape; None if its rank is unknown. Raises an error for one below zero."""
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def _rank(shape: tuple[int | None, ...] | None) -> int | None:
    return None if shape is None else len(shape)
