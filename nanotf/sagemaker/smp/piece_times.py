"""Measures for how long the pieces of a traced call compute, one after the other.

A piece runs by itself: its operations, and what they need of constants, are copied into a graph of
their own. Tensors of other pieces are replaced by constant ones of the same shape, variables by
temporary ones, so that only one piece's variables exist at a time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs, values
from nanotf.sagemaker.smp.trace import TracedCall

_RUNS = 3  # after one that allocates memory; the shortest counts


def seconds(
    traced: TracedCall, pieces: Sequence[Sequence[Any]], everywhere: Collection[str]
) -> list[float] | None:
    """Returns the seconds of each piece's forward pass, in this process.

    Args:
        pieces: the `tf.Operation`s of each, each after those that it depends on.
        everywhere: names of operations that belong to no piece.

    Returns:
        By piece; None if a shape is unknown, or if a piece cannot run by itself.
    """
    try:
        library = traced.function.graph.as_graph_def().library
        return [_Piece(traced, each, everywhere, library).seconds() for each in pieces]
    except (ValueError, TypeError, tf.errors.OpError):  # of TensorFlow, for a graph it cannot run
        return None


class _Piece:
    """A piece with all that it needs.

    Args:
        traced, operations, everywhere: as of `seconds`.
        library: the functions that the operations call, of the traced graph's definition.
    """

    def __init__(
        self,
        traced: TracedCall,
        operations: Sequence[Any],
        everywhere: Collection[str],
        library: Any,
    ) -> None:
        self._traced = traced
        self._inside = {op.name for op in operations}
        self._everywhere = everywhere
        self._nodes: dict[str, Any] = {}  # operations by name, also those without a piece
        self._feeds: dict[str, Any] = {}  # by name, tensors that come from elsewhere
        for op in operations:
            self._take(op)
        self._definition = tf.compat.v1.GraphDef(library=library)
        # A definition without versions counts as one of the oldest TensorFlow.
        self._definition.versions.CopyFrom(traced.function.graph.graph_def_versions)
        self._definition.node.extend(self._copies())
        self._ends = [part.name for op in operations for part in op.outputs if self._leaves(part)]

    def _take(self, operation: Any) -> None:
        """Adds an operation, and those without a piece that it depends on."""
        waiting = [operation]
        while waiting:
            op = waiting.pop()
            if op.name in self._nodes:
                continue
            self._nodes[op.name] = op
            for part in op.inputs:
                own = part.op.name in self._inside or part.op.name in self._everywhere
                if part.op.type == "Placeholder" or not own:
                    self._feeds[part.name] = part
                else:
                    waiting.append(part.op)

    def _leaves(self, part: Any) -> bool:
        """Returns True for a tensor that is needed elsewhere. TensorFlow computes no others."""
        if any(part is result for result in self._traced.outputs):
            return True
        return any(reader.name not in self._inside for reader in part.consumers())

    def _copies(self) -> Iterator[Any]:
        for op in self._nodes.values():
            node = type(op.node_def)()
            node.CopyFrom(op.node_def)
            node.attr.pop("_class", None)  # places it beside an operation that may be missing
            # Edges marked by "^" order effects. Without them none runs, such as a print.
            inputs = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(inputs)
            yield node

    def seconds(self) -> float:
        """Runs the piece, and returns the seconds of its shortest run."""
        specs = [
            # A handle is a scalar, whatever the shape of its variable.
            tf.TensorSpec([] if part.dtype == tf.resource else part.shape, part.dtype)
            for part in self._feeds.values()
        ]
        function = tf.compat.v1.wrap_function(self._imported, specs)
        variables, given = self._given()
        function(*given)
        times = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            function(*given)
            times.append(time.perf_counter() - began)
        del variables  # until here, they keep the handles among `given` alive
        return min(times)

    def _imported(self, *tensors: Any) -> Any:
        return tf.graph_util.import_graph_def(
            self._definition,
            input_map=dict(zip(self._feeds, tensors, strict=True)),
            return_elements=self._ends,
            name="",
        )

    def _given(self) -> tuple[list[Any], list[Any]]:
        """Returns temporary variables, and a value for each tensor from elsewhere."""
        resources = self._traced.resources()
        known = {id(v.handle): v for v in self._traced.function.graph.variables}
        variables, given = [], []
        for part in self._feeds.values():
            if part.dtype == tf.resource:
                original = known.get(id(resources.get(id(part))))
                if original is None:
                    raise ValueError(f"{part.name} is a resource other than a variable.")
                # `tf.Variable` would tell a `tf.function` that is being traced, which traces anew.
                made = values.uninitialized(original.shape, original.dtype, {"trainable": False})
                graphs.refill(made, _constant(original))
                variables.append(made)
                given.append(made.handle)
            else:
                given.append(_constant(part))
        return variables, given


def _constant(like: Any) -> Any:
    """Returns a constant tensor of the shape and dtype of a tensor or variable."""
    if not like.shape.is_fully_defined():
        raise ValueError(f"{like.name} is of unknown shape: {like.shape}.")
    if like.dtype.is_floating:
        return tf.fill(like.shape, tf.cast(0.5, like.dtype))
    return tf.zeros(like.shape, like.dtype)  # as indices, valid for any table
