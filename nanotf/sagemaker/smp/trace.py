"""Traces a model's call and notes the partition of each of its operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs
from nanotf.compat.keras_common import around_layers, flat_layers, is_keras_own
from nanotf.errors import ModelError
from nanotf.sagemaker.smp import runtime, step_seeds


class Notes:
    """The partitions of a graph's operations, as `smp.partition` assigns them.

    Args:
        graph: that of the traced call.

    Attributes:
        partitions: by the operation's name.
        layers: the names of the operations that each layer makes.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.partitions: dict[str, int] = {}  # by the operation's name
        self.layers: list[list[str]] = []

    @contextlib.contextmanager
    def assigned(self, partition: int) -> Iterator[None]:
        """Assigns operations made in this context, except those of contexts inside it."""
        before = len(self._graph.get_operations())
        yield
        for operation in self._graph.get_operations()[before:]:
            # Contexts inside this one ended first, so theirs are set.
            self.partitions.setdefault(operation.name, partition)

    @contextlib.contextmanager
    def of_layer(self, layer: Any) -> Iterator[None]:
        """Notes the operations made in this context as those of a layer.

        A model, and a layer of the user's that has others in it, can be cut inside.
        """
        tf_model, inside = tf.keras.Model, len(flat_layers(layer)) > 1
        if isinstance(layer, tf_model) or (inside and not is_keras_own(type(layer))):
            yield
            return
        before = len(self._graph.get_operations())
        yield
        self.layers.append([op.name for op in self._graph.get_operations()[before:]])


@dataclass(frozen=True)
class TracedCall:
    """A traced call."""

    function: Any  # what `tf.compat.v1.wrap_function` returns
    inputs: list[Any]  # tensors in its graph, one for each tensor among the arguments
    outputs: list[Any]  # tensors in its graph
    structure: Any  # the model's results, for `tf.nest.pack_sequence_as`
    partitions: dict[str, int]  # by an operation's name, for those inside a `smp.partition`
    effects: set[Any]  # operations that must run although no result depends on them
    layers: list[list[str]]  # the names of the operations that each layer makes

    @property
    def draws(self) -> bool:
        """True if an operation draws from a state of its own, by seeds given to it here."""
        return any(graphs.drawing(self.function.graph.as_graph_def()))

    @property
    def operations(self) -> list[Any]:
        """The graph's operations, each after those it depends on."""
        found: list[Any] = self.function.graph.get_operations()
        return found

    def resources(self) -> dict[int, Any]:
        """Returns the captured resources: the id of the tensor in the graph, and that outside."""
        pairs = self.function.graph.captures
        return {id(inner): outer for outer, inner in pairs if inner.dtype == tf.resource}


def trace(
    call: Callable[..., Any], specs: Sequence[Any], creator: Callable[..., Any]
) -> TracedCall:
    """Traces a call.

    Args:
        call: takes one tensor for each of `specs`, and returns a nested structure of tensors.
        specs: of type `tf.TensorSpec`.
        creator: makes the variables, see `tf.variable_creator_scope`.

    Raises:
        ModelError: The call returns something else than tensors.
    """
    found: dict[str, Any] = {}
    effects = graphs.SideEffects()

    def traced(*inputs: Any) -> Any:
        notes = Notes(tf.compat.v1.get_default_graph())
        if (seeds := step_seeds.current()) is not None:
            seeds.continues_in(tf.compat.v1.get_default_graph())
        # This scope is inside one that keeps variables by name, which Keras 3 uses twice.
        with contextlib.ExitStack() as stack:
            stack.enter_context(tf.variable_creator_scope(creator))
            stack.enter_context(effects.ordered())
            stack.enter_context(runtime.setting(runtime.notes, notes))
            stack.enter_context(around_layers(notes.of_layer))
            stack.enter_context(graphs.reading_released())  # other processes run those reads
            results = call(*inputs)
        flat = tf.nest.flatten(results, expand_composites=True)
        _check_results(flat)
        found.update(inputs=list(inputs), structure=results, partitions=notes.partitions)
        found["layers"] = notes.layers
        found["outputs"] = [tf.convert_to_tensor(part) for part in flat]
        return found["outputs"]

    # Not `tf.function`: only what this makes can be pruned to a stage.
    function = tf.compat.v1.wrap_function(traced, list(specs))
    return TracedCall(function=function, effects=effects.operations, **found)


def _check_results(flat: Sequence[Any]) -> None:
    for part in flat:
        if not tf.is_tensor(part):
            raise ModelError(
                "A model that is cut into partitions returns tensors, in any nested structure. "
                f"Received: {part!r} among the results of its call."
            )
