"""The optimizer's work, divided between the workers.

Under a mirrored strategy every worker makes the same update of all variables. For optimizers
that treat every element alike it can be divided, with the same result (ZeRO stage 1: Rajbhandari
et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020):

    1. reduce-scatter: each worker gets its N-th part of the summed gradients, as one vector
    2. the optimizer updates that part of the variables, and keeps that part of its slots
    3. gather: each worker gets all updated variables

Variables whose gradients may be sparse stay whole (`UNDIVIDED_LAYERS`).

This moves as many bytes as an all-reduce of the gradients. The optimizer does an N-th of the
work and takes an N-th of the memory; and its ten or so operations run once, on one long vector,
instead of once for each variable.

The parent decides (`OptimizerShards.of`), since it has the user's optimizer; `ShardedUpdate` is
the worker's side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nanotf.compat import keras_names, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.region import rows

# Element-wise ones that keep slots, by class name. Without slots there is little to divide;
# Adagrad and Ftrl have cheap sparse updates of their own; Keras 2's Nadam counts its calls in
# Python.
ELEMENTWISE = ("Adadelta", "Adam", "AdamW", "Adamax", "Lion", "RMSprop", "SGD", "SparseAdam")
# Keras's layers whose variables stay whole. Embedding: its gradients are sparse, and Keras 3
# squares the rows of a sparse gradient before it adds up those of one index, so that a dense one
# would not give what one process gets. SpectralNormalization assigns to the variables.
UNDIVIDED_LAYERS = ("Embedding", "SpectralNormalization")
_SMALLEST = 1024  # elements; below this the update takes no time


@dataclasses.dataclass(frozen=True)
class OptimizerShards:
    """Which variables a divided update is about.

    Args:
        divided: tuple of int, which of the model's trainable variables are divided, by their
            places among these; each worker updates the others as a whole.
        places: tuple of int, their places in the job's state.
        slots: tuple of pairs, an attribute of the optimizer and the places of its slots for the
            divided variables.
        elements: int, of all divided variables.
        refresh: bool, whether something other than the optimizer may change them.
    """

    divided: tuple[int, ...]
    places: tuple[int, ...]
    slots: tuple[tuple[str, tuple[int, ...]], ...]
    elements: int
    refresh: bool

    @classmethod
    def of(cls, model: Any, variables: Sequence[Any]) -> OptimizerShards | None:
        """What can be divided of a model's update; None if nothing can.

        Args:
            model: a built and compiled model, its optimizer built.
            variables: sequence of `tf.Variable`, the job's state.
        """
        optimizer = model.optimizer
        if not _is_known(type(optimizer)) or not keras_names.is_keras_own(type(model).train_step):
            return None
        if not keras_optimizers.updates_elements_apart(optimizer, ELEMENTWISE):
            return None
        trainable = [keras_names.tf_variable(v) for v in model.trainable_variables]
        place = {id(variable): i for i, variable in enumerate(variables)}
        slots = {
            name: [place[id(keras_names.tf_variable(v))] for v in slot]
            for name, slot in keras_optimizers.optimizer_slots(optimizer).items()
        }
        if not slots or not _are_understood(optimizer, slots, trainable, variables):
            return None
        divisible = _divisible_variables(model)
        divided = [i for i, v in enumerate(trainable) if id(v) in divisible]
        elements = sum(int(trainable[i].shape.num_elements()) for i in divided)
        if elements < _SMALLEST or len({trainable[i].dtype for i in divided}) > 1:
            return None
        return cls(
            tuple(divided),
            tuple(place[id(trainable[i])] for i in divided),
            tuple((name, tuple(slots[name][i] for i in divided)) for name in sorted(slots)),
            elements,
            not all(
                keras_names.is_keras_own(type(layer))
                for layer in [model, *keras_names.layers_below(model)]
            ),
        )


def _is_known(optimizer: type) -> bool:
    """Whether a class of optimizers is Keras's own or nanotf's."""
    return keras_names.is_keras_own(optimizer) or optimizer.__module__ == "nanotf.keras.optimizers"


def _are_understood(
    optimizer: Any, slots: dict[str, list[int]], trainable: Sequence[Any], variables: Sequence[Any]
) -> bool:
    """Whether each list of slots has one of its shape for each variable, and nothing is left."""
    shapes = [v.shape for v in trainable]
    found = [i for places in slots.values() for i in places]
    own = sum(1 for v in keras_optimizers.optimizer_variables(optimizer) if v.shape.rank)
    scalars = sum(1 for i in found if not variables[i].shape.rank)
    return len(found) == len(set(found)) == own + scalars and all(
        [variables[i].shape for i in places] == shapes for places in slots.values()
    )


def _divisible_variables(model: Any) -> set[int]:
    """The ids of variables that belong to Keras's own layers and have dense gradients."""
    divisible: set[int] = set()
    whole: set[int] = set()
    for layer in keras_names.layers_below(model):
        variables = layer.trainable_variables
        ids = {id(keras_names.tf_variable(v)) for v in variables}
        if {cls.__name__ for cls in type(layer).__mro__} & set(UNDIVIDED_LAYERS):
            whole |= ids
        elif keras_names.is_keras_own(type(layer)) and not keras_names.layers_below(layer):
            constrained = any(getattr(v, "constraint", None) for v in variables)
            (whole if constrained else divisible).update(ids)
    return divisible - whole


class ShardedUpdate:
    """This worker's part of the update, under its strategy.

    Args:
        strategy: `strategy.WorkerStrategy` with a group.
        optimizer: the model's optimizer, not built yet.
        trainable: list of the model's trainable variables.
        shards: `OptimizerShards`.

    Attributes:
        part: the Keras variable that holds this worker's part of the divided variables. The
            optimizer knows it in their place.
    """

    def __init__(
        self, strategy: Any, optimizer: Any, trainable: Sequence[Any], shards: OptimizerShards
    ) -> None:
        tf = require_tensorflow()
        self.strategy = strategy
        self.optimizer = optimizer
        self.shards = shards
        self.bounds = strategy.part_of(shards.elements)
        dtype = keras_names.tf_variable(trainable[shards.divided[0]]).dtype
        self.part = generation().make_variable(
            tf.zeros([self.bounds[1] - self.bounds[0]], dtype), "part"
        )
        # In a variable: what is multiplied by a constant zero, TensorFlow does not read.
        self._adds_whole = tf.Variable(float(strategy.rank == 0), trainable=False)
        optimizer.build([self.part, *self._whole(trainable)])
        generation().apply_through(optimizer, self._apply)

    def variables(self) -> list[tuple[Any, tuple[int, ...], tuple[int, int], bool]]:
        """The variables that hold parts, as `shipping.state.Part` takes them.

        Returns:
            A list of tuples: the `tf.Variable`; the places, in the job's state, of what it is a
            part of; its bounds; whether nothing else in this process holds those elements.
        """
        slots = keras_optimizers.optimizer_slots(self.optimizer)
        found = [(self.part, self.shards.places, False)]
        found += [(slots[name][0], places, True) for name, places in self.shards.slots]
        return [
            (keras_names.tf_variable(v), places, self.bounds, only) for v, places, only in found
        ]

    def _divided(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.shards.divided]

    def _whole(self, values: Sequence[Any]) -> list[Any]:
        return [v for i, v in enumerate(values) if i not in self.shards.divided]

    def _apply(self, update: Any, gradients: Sequence[Any], trainable: Sequence[Any]) -> None:
        """Makes one step; called in replica context, where Keras would apply the gradients.

        Args:
            update: callable of a list of summed gradients and of variables, which updates those.
            gradients: list of tensors, `tf.IndexedSlices` or None.
            trainable: list of the model's trainable variables.
        """
        tf = require_tensorflow()
        variables = [keras_names.tf_variable(v) for v in self._divided(trainable)]
        found = self._divided(gradients)
        parts = [self._own_part(g, v) for g, v in zip(found, variables, strict=True)]
        part = keras_names.tf_variable(self.part)
        if self.shards.refresh:
            part.assign(self._part_of(variables))
        kept = self._without_gradient([g is None for g in found], variables)
        summed = self.strategy.reduce_scatter(parts)
        update([summed, *self._whole(gradients)], [self.part, *self._whole(trainable)])
        for variable, value, mask in kept:
            variable.assign(tf.where(mask, value, variable))
        updated = self.strategy.gather_parts(part.read_value(), parts)
        for variable, value in zip(variables, updated, strict=True):
            variable.assign(value)

    def _own_part(self, gradient: Any, variable: Any) -> Any:
        """What this worker adds to a gradient; of one that is no sum over workers, rank 0 all."""
        tf = require_tensorflow()
        if gradient is None:
            return tf.zeros_like(variable)
        part = rows.part_of(gradient)
        if part is None:
            # All ranks read it: what one does not, it does not exchange either.
            part = tf.convert_to_tensor(gradient)
            part *= tf.cast(self._adds_whole, part.dtype)
        # Some gradients, of layer normalisation for one, do not know their shape when traced.
        return tf.ensure_shape(part, variable.shape)

    def _part_of(self, tensors: Sequence[Any]) -> Any:
        tf = require_tensorflow()
        pieces = [
            tf.reshape(tensors[i], [-1])[first:last]
            for i, first, last in pieces_of(self.bounds, [t.shape for t in tensors])
        ]
        # The last of many workers may have no part: 1,056 elements are 33 times 32.
        return tf.concat(pieces, axis=0) if pieces else tf.zeros([0], tensors[0].dtype)

    def _without_gradient(self, absent: Sequence[bool], locals_: Sequence[Any]) -> list[Any]:
        """What a step must leave as it is, because the loss does not depend on it.

        Returns:
            A list of tuples: variable, its value, and a mask of the elements to put back.
        """
        tf = require_tensorflow()
        if not any(absent):
            return []
        flags = [tf.fill(v.shape, gone) for gone, v in zip(absent, locals_, strict=True)]
        mask = self._part_of(flags)
        parts = [variable for variable, *_ in self.variables()]
        return [(variable, variable.read_value(), mask) for variable in parts]


def pieces_of(bounds: tuple[int, int], shapes: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Where a part of several arrays, seen as one vector, lies in them.

    Args:
        bounds: the part's first element and the element after its last.
        shapes: sequence of shapes.

    Returns:
        A list of tuples: index of the array, its first element in the part, the element after
        the last.
    """
    pieces, start = [], 0
    for index, shape in enumerate(shapes):
        elements = 1
        for dimension in shape:
            elements *= int(dimension)
        first, last = max(bounds[0] - start, 0), min(bounds[1] - start, elements)
        if first < last:
            pieces.append((index, first, last))
        start += elements
    return pieces
