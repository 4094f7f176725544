"""Copies the graph of a traced function into another graph, for arguments of known shapes.

A function of a SavedModel was traced for any number of rows: its graph has unknown shapes, and that
of its calls, loops and branches, too. TensorFlow infers the shapes anew while the copy is made. The
copy has the operations of calls in place of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs
from nanotf.region.proof.states import Coupled

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_FIRST_TENSORFLOWS = ("Enter", "Exit", "Merge", "NextIteration", "Switch")  # its loops and branches


def copy(graph: Any, arguments: Sequence[Any]) -> list[Any]:
    """Copies a graph into the default graph.

    Args:
        graph: of a `tf.ConcreteFunction`.
        arguments: tensors in place of its inputs, those that it captures left out.

    Returns:
        The tensors of its outputs.

    Raises:
        Coupled: It runs functions that are neither calls, loops nor branches.
    """
    captured = graphs.captured(graph)
    free = len(graph.inputs) - len(captured)
    by_placeholder = {inner.ref(): outer for outer, inner in captured}
    behind = [by_placeholder[inner.ref()] for inner in graph.inputs[free:]]
    return _Copier().copied(graph, [*arguments, *behind])


class _Copier:
    """A copy while it is made."""

    def __init__(self) -> None:
        # By a list's `ref()`, the shape of its elements; None if they differ. A graph for any
        # number of rows says only [-1, 16], and TensorFlow infers no more from an element.
        self._elements: dict[Any, tf.TensorShape | None] = {}
        self._counts: dict[Any, int] = {}  # by a list's `ref()`, how many elements it has, if known
        self._values: dict[Any, Any] = {}  # by a tensor's `ref()`, see `_value`

    def copied(self, graph: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a copy in the default graph."""
        mine = {
            placeholder.ref(): tensor
            for placeholder, tensor in zip(graph.inputs, inputs, strict=True)
        }
        for operation in graph.get_operations():
            if operation.type in _FIRST_TENSORFLOWS:
                raise Coupled("it has loops or branches of TensorFlow 1")
            if all(tensor.ref() in mine for tensor in operation.outputs) and operation.outputs:
                continue  # an input
            results = self._operation(operation, [mine[t.ref()] for t in operation.inputs])
            mine.update(zip([t.ref() for t in operation.outputs], results, strict=True))
        return [mine[tensor.ref()] for tensor in graph.outputs]

    def _operation(self, operation: Any, inputs: list[Any]) -> Sequence[Any]:
        inner = graphs.functions_of(operation)
        if operation.type in _CALLS:
            return self.copied(inner[0], inputs)
        if operation.type in _LOOPS:
            return self._loop(operation, inner, inputs)
        if operation.type in _BRANCHES:
            return self._branches(operation, inner, inputs)
        attributes = {
            name: value
            for name, value in operation.node_def.attr.items()
            if not name.startswith("_")  # notes of TensorFlow, such as shapes
        }
        if any(value.HasField("func") or value.list.func for value in attributes.values()):
            raise Coupled(f"{operation.type} ({operation.name}) runs functions of its own")
        made = tf.compat.v1.get_default_graph().create_op(
            operation.type,
            inputs,
            [tensor.dtype for tensor in operation.outputs],
            name=operation.name,
            attrs=attributes,
            op_def=operation.op_def,
        )
        self._shape_elements(made, inputs)
        found: Sequence[Any] = made.outputs
        return found

    def _loop(self, operation: Any, inner: Sequence[Any], inputs: list[Any]) -> list[Any]:
        condition, body = inner

        def run(graph: Any) -> Callable[..., list[Any]]:
            def call(*values: Any) -> list[Any]:
                given = list(inputs)
                for place, value in zip(moving, values, strict=True):
                    self._note(value, inputs[place])
                    given[place] = value
                return self.copied(graph, given)

            return call

        def step(*values: Any) -> list[Any]:
            results = run(body)(*values)
            for place, result in enumerate(results):
                after.setdefault(place, result)
            return [results[place] for place in moving]

        after: dict[int, Any] = {}
        # Values that stay as they are, such as the handles of variables, are not the loop's.
        moving = [i for i, t in enumerate(body.outputs) if not _passes_on(body, t, i)]
        found = tf.while_loop(
            lambda *values: run(condition)(*values)[0],
            step,
            [inputs[place] for place in moving],
            [_invariant(operation.inputs[i], body.inputs[i], inputs[i]) for i in moving],
        )
        results = list(inputs)
        for place, result in zip(moving, found, strict=True):
            self._note(result, after[place])
            results[place] = result
        return results

    def _branches(self, operation: Any, inner: Sequence[Any], inputs: list[Any]) -> list[Any]:
        made: list[list[Any]] = []

        def run(graph: Any) -> Callable[[], list[Any]]:
            def call() -> list[Any]:
                made.append(self.copied(graph, inputs[1:]))
                return made[-1]

            return call

        calls = [run(graph) for graph in inner]
        if "If" in operation.type:
            found = tf.cond(inputs[0], *calls)
        else:
            found = tf.switch_case(inputs[0], calls)
        results = list(found) if isinstance(found, (list, tuple)) else [found]
        for place, result in enumerate(results):
            for each in made:
                self._note(result, each[place])
        return results

    # ------------------------------------------------------------------------ elements of lists
    def _note(self, tensor: Any, like: Any) -> None:
        """Notes that a list has elements as another one, and as many."""
        if like.dtype != tf.variant:
            return
        if like.ref() in self._elements:
            self._add(tensor, self._elements[like.ref()])
        if like.ref() in self._counts:
            self._counts[tensor.ref()] = self._counts[like.ref()]

    def _add(self, tensor: Any, shape: tf.TensorShape | None) -> None:
        known = self._elements.setdefault(tensor.ref(), shape)
        if known is None or shape is None or known.as_list() != shape.as_list():
            self._elements[tensor.ref()] = None

    def _shape_elements(self, operation: Any, inputs: list[Any]) -> None:
        kind, outputs = operation.type, operation.outputs
        if kind in ("Identity", "TensorListSetItem", "ZerosLike"):
            self._note(outputs[0], inputs[0])
        if kind in ("TensorListPushBack", "TensorListPopBack", "TensorListResize"):
            self._note(outputs[0], inputs[0])
            self._counts.pop(outputs[0].ref(), None)  # they have another number of elements
        if kind == "TensorListReserve":
            count = self._value(inputs[1])
            if count is not None:
                self._counts[outputs[0].ref()] = int(count)
        if kind == "TensorListFromTensor" and inputs[0].shape.is_fully_defined():
            self._add(outputs[0], inputs[0].shape[1:])
            self._counts[outputs[0].ref()] = inputs[0].shape[0]
        if kind in ("TensorListSetItem", "TensorListPushBack"):
            item = inputs[2 if kind == "TensorListSetItem" else 1]
            self._add(outputs[0], item.shape if item.shape.is_fully_defined() else None)
        shape = self._elements.get(inputs[0].ref()) if inputs else None
        if shape is not None:
            self._shape_results(operation, shape, self._counts.get(inputs[0].ref()))

    def _shape_results(self, operation: Any, shape: tf.TensorShape, count: int | None) -> None:
        if operation.type in ("TensorListGetItem", "TensorListPopBack"):
            operation.outputs[-1].set_shape(shape)
        if operation.type == "TensorListStack":
            operation.outputs[0].set_shape(tf.TensorShape([count]).concatenate(shape))
        if operation.type == "TensorListGather":
            operation.outputs[0].set_shape(operation.inputs[1].shape.concatenate(shape))

    def _value(self, tensor: Any) -> Any:
        """Returns a constant tensor's value, None if it is not constant."""
        if tensor.ref() not in self._values:
            self._values[tensor.ref()] = None
            self._values[tensor.ref()] = graphs.constant(tensor, self._value, 16)
        return self._values[tensor.ref()]


def _passes_on(body: Any, tensor: Any, place: int) -> bool:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return bool(tensor is body.inputs[place])


def _invariant(before: Any, inside: Any, given: Any) -> tf.TensorShape:
    """Returns a loop variable's shape in all turns.

    Args:
        before, inside: the variable before the loop and in it, in the graph that is copied.
        given: the variable before the loop, in the copy.
    """
    if None in (before.shape.rank, inside.shape.rank, given.shape.rank):
        return inside.shape
    axes = zip(before.shape, inside.shape, given.shape, strict=True)
    return tf.TensorShape([None if was is not None and now is None else d for was, now, d in axes])
