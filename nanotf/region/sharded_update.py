"""The optimizer's work, divided between the workers.

Under a mirrored strategy every worker makes the same update of all variables. For optimizers
that treat every element alike it can be divided, with the same result (ZeRO stage 1: Rajbhandari
et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020):

    1. reduce-scatter: each worker gets its N-th part of the summed gradients, as one vector
    2. the optimizer updates that part of the variables, and keeps that part of its slots
    3. gather: each worker gets all updated variables

The table of an embedding, whose gradient is sparse, is divided by rows: each worker gets all rows
of the gradient, and updates its own rows of the table. If that changes only the rows that the
gradient names, only those are exchanged.

This moves as many bytes as an all-reduce of the gradients. The optimizer does an N-th of the
work and takes an N-th of the memory; and its roughly ten operations run once, on one long vector,
instead of once for each variable.

The parent decides (`OptimizerShards.of`), since it has the user's optimizer; `ShardedUpdate` is
the worker's side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nanotf.compat import keras_common, keras_layers, keras_models, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.region import rows
from nanotf.region.sparse_gradients import SummedRows, joined_of_sums

# Class names of element-wise optimizers. Keras 2's Nadam counts its calls in Python; Adagrad and
# Ftrl keep Keras's cheap sparse updates.
ELEMENTWISE = ("Adadelta", "Adam", "AdamW", "Adamax", "Lion", "RMSprop", "SGD", "SparseAdam")
# Keras's layers whose variables stay whole, since they assign to them.
UNDIVIDED_LAYERS = ("SpectralNormalization",)
_SMALLEST = 1024  # elements; below this the update takes no time


@dataclasses.dataclass(frozen=True)
class Divided:
    """Divided variables, and their places in the call's state."""

    trainable: tuple[int, ...]  # their places among the model's trainable variables
    places: tuple[int, ...]  # their places in the call's state
    # Pairs of an attribute of the optimizer and the places of its slots for these variables.
    slots: tuple[tuple[str, tuple[int, ...]], ...]

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Selects these variables' values from the values of all trainable variables."""
        return [values[i] for i in self.trainable]


@dataclasses.dataclass(frozen=True)
class OptimizerShards:
    """The variables of a divided update; each worker updates the others as a whole."""

    dense: Divided  # the variables that are divided as one vector
    tables: Divided  # the variables that are each divided by rows
    refresh: bool  # whether anything besides the optimizer may change the variables

    @classmethod
    def of(cls, model: Any, variables: Sequence[Any]) -> OptimizerShards | None:
        """Returns the divisible part of a model's update; None if nothing is divisible.

        Args:
            model: a built and compiled model, its optimizer built.
            variables: the `tf.Variable`s of the call's state.
        """
        optimizer = model.optimizer
        # A `train_step` of the user's may do more with gradients than apply all of them once.
        if not _is_known(type(optimizer)) or not keras_common.is_keras_own(type(model).train_step):
            return None
        if not keras_optimizers.updates_elements_apart(optimizer, ELEMENTWISE):
            return None
        trainable = [keras_common.tf_variable(v) for v in model.trainable_variables]
        place = {id(variable): i for i, variable in enumerate(variables)}
        found = keras_optimizers.optimizer_slots(optimizer)
        if any(slot is None for each in found.values() for slot in each):
            return None  # an 8-bit variable, of which the optimizer keeps nothing
        slots = {
            name: [place[id(keras_common.tf_variable(v))] for v in each]
            for name, each in found.items()
        }
        if not _are_understood(optimizer, slots, trainable, variables):
            return None

        def divided(ids: set[int]) -> Divided:
            found = tuple(i for i, v in enumerate(trainable) if id(v) in ids)
            return Divided(
                found,
                tuple(place[id(trainable[i])] for i in found),
                tuple((name, tuple(slots[name][i] for i in found)) for name in sorted(slots)),
            )

        divisible, of_embeddings = _divisible_variables(model)
        dense = divided(divisible)
        # They form one vector; the optimizer is built with this worker's part of it.
        if not dense.trainable or len({v.dtype for v in dense.of(trainable)}) > 1:
            return None
        refresh = not all(
            keras_common.is_keras_own(type(layer))
            for layer in [model, *keras_layers.layers_below(model)]
        )
        large = {id(v) for v in trainable if v.shape.num_elements() >= _SMALLEST}
        # To refresh whole tables would cost more than it saves.
        by_touch = _changes_named_rows_alone(optimizer)
        tables = divided(set() if by_touch and refresh else of_embeddings & large)
        elements = sum(int(v.shape.num_elements()) for v in dense.of(trainable))
        if elements < _SMALLEST and not tables.trainable:
            return None
        return cls(dense, tables, refresh)


def _is_known(optimizer: type) -> bool:
    """Returns True if a class of optimizers is Keras's own or nanotf's."""
    return keras_common.is_keras_own(optimizer) or optimizer.__module__ == "nanotf.keras.optimizers"


def _changes_named_rows_alone(optimizer: Any) -> bool:
    """Returns True if a sparse gradient changes only the rows that it names."""
    if getattr(optimizer, "weight_decay", None):
        return False
    is_plain_sgd = type(optimizer).__name__ == "SGD" and not optimizer.momentum
    return is_plain_sgd or isinstance(optimizer, SummedRows)


def _are_understood(
    optimizer: Any, slots: dict[str, list[int]], trainable: Sequence[Any], variables: Sequence[Any]
) -> bool:
    """Returns True if the lists of slots have one slot per variable, and contain all slots."""
    shapes = [v.shape for v in trainable]
    found = [i for places in slots.values() for i in places]
    own = sum(1 for v in keras_optimizers.optimizer_variables(optimizer) if v.shape.rank)
    scalars = sum(1 for i in found if not variables[i].shape.rank)
    return len(found) == len(set(found)) == own + scalars and all(
        [variables[i].shape for i in places] == shapes for places in slots.values()
    )


def _divisible_variables(model: Any) -> tuple[set[int], set[int]]:
    """Returns ids of Keras's own layers' variables: those with dense gradients, and embeddings."""
    divisible: set[int] = set()
    tables: set[int] = set()
    whole: set[int] = set()
    for layer in keras_layers.layers_below(model):
        variables = layer.trainable_variables
        ids = {id(keras_common.tf_variable(v)) for v in variables}
        if {cls.__name__ for cls in type(layer).__mro__} & set(UNDIVIDED_LAYERS):
            whole |= ids
        elif keras_common.is_keras_own(type(layer)) and not keras_layers.layers_below(layer):
            # A constraint, such as a largest norm, looks at the whole variable.
            constrained = any(getattr(v, "constraint", None) for v in variables)
            is_table = isinstance(layer, keras_models.embedding_class())
            (whole if constrained else tables if is_table else divisible).update(ids)
        elif isinstance(layer, keras_models.embedding_class()):  # the user's, whose gradient may be
            whole |= ids  # sparse
    return divisible - whole - tables, tables - whole - divisible  # layers may share one


class ShardedUpdate:
    """This worker's part of the update, under its strategy.

    Args:
        strategy: `strategy.WorkerStrategy` with a group.
        optimizer: the model's optimizer. Another like it keeps the slots of the parts.
        trainable: the model's trainable variables.

    Attributes:
        part: the Keras variable that holds this worker's part of the divided variables. The
            optimizer updates it instead of them.
        divided: list of `tf.Variable`, which each step sets to values that all workers read from
            the same memory.
        alike: those of them that nothing else changes.
    """

    def __init__(
        self, strategy: Any, optimizer: Any, trainable: Sequence[Any], shards: OptimizerShards
    ) -> None:
        tf = require_tensorflow()
        self.strategy = strategy
        self._place = strategy.place_for(self)
        self.optimizer = keras_optimizers.unbuilt_twin(optimizer)
        self.shards = shards
        dense = [keras_common.tf_variable(v) for v in shards.dense.of(trainable)]
        self.bounds = strategy.part_of(sum(int(v.shape.num_elements()) for v in dense))
        self.part = generation().make_variable(
            tf.zeros([self.bounds[1] - self.bounds[0]], dense[0].dtype), "part"
        )
        tables = [keras_common.tf_variable(v) for v in shards.tables.of(trainable)]
        ways = isinstance(optimizer, SummedRows), _changes_named_rows_alone(optimizer)
        self._tables = [_TablePart(strategy, v, *ways) for v in tables]
        self.divided = [*dense, *tables]
        self.alike = [] if shards.refresh else self.divided
        # A variable, since TensorFlow does not read an operand multiplied by a constant zero.
        self._adds_whole = tf.Variable(float(strategy.rank == 0), trainable=False)
        divided = [self.part, *(table.part for table in self._tables)]
        self.optimizer.build([*divided, *self._whole(trainable)])
        self._slots = keras_optimizers.optimizer_slots(self.optimizer)
        whole = keras_optimizers.optimizer_slots(optimizer)
        for name, slots in self._slots.items():
            # Undivided variables keep their slots in `optimizer`, which the call's state holds.
            vars(self.optimizer)[name] = slots[: len(divided)] + self._whole(whole[name])
        generation().apply_through(optimizer, self.optimizer, self._apply)

    def variables(self) -> list[tuple[Any, tuple[int, ...], tuple[int, int], bool]]:
        """The variables that hold parts, as arguments of `shipping.state.VectorPart`.

        Returns:
            A list of tuples: the `tf.Variable`; the places, in the call's state, of the variables
            that it is a part of; its bounds; whether no other variable in this process holds its
            elements.
        """
        slots = self._slots
        dense, tables = self.shards.dense, self.shards.tables
        found = [(self.part, dense.places, self.bounds, False)]
        found += [(slots[name][0], places, self.bounds, True) for name, places in dense.slots]
        for i, table in enumerate(self._tables):
            found.append((table.part, tables.places[i : i + 1], table.elements, False))
            found += [
                (slots[name][1 + i], places[i : i + 1], table.elements, True)
                for name, places in tables.slots
            ]
        return [(keras_common.tf_variable(v), *others) for v, *others in found]

    def _whole(self, values: Sequence[Any]) -> list[Any]:
        divided = {*self.shards.dense.trainable, *self.shards.tables.trainable}
        return [v for i, v in enumerate(values) if i not in divided]

    def _apply(self, update: Any, gradients: Sequence[Any], trainable: Sequence[Any]) -> None:
        """Makes one step; called in replica context, where Keras would apply the gradients.

        Args:
            update: takes a list of summed gradients and a list of variables; updates the variables.
            gradients: tensors, `tf.IndexedSlices` or None, in the order of `trainable`.
            trainable: the model's trainable variables.
        """
        tf = require_tensorflow()
        variables = [keras_common.tf_variable(v) for v in self.shards.dense.of(trainable)]
        tables = [keras_common.tf_variable(v) for v in self.shards.tables.of(trainable)]
        found = self.shards.dense.of(gradients)
        parts = [self._own_part(g, v) for g, v in zip(found, variables, strict=True)]
        part = keras_common.tf_variable(self.part)
        if self.shards.refresh:  # others may have changed the variables since the last step
            part.assign(self._part_of(variables))
            for own, table in zip(self._tables, tables, strict=True):
                own.take(table)
        kept = self._without_gradient([g is None for g in found], variables)  # before the update
        summed = self.strategy.reduce_scatter(parts)
        pairs = zip(self._tables, self.shards.tables.of(gradients), strict=True)
        of_tables = [own.of(gradient) for own, gradient in pairs]
        update(
            [summed, *of_tables, *self._whole(gradients)],
            [self.part, *(own.part for own in self._tables), *self._whole(trainable)],
        )
        for variable, value, mask in kept:
            variable.assign(tf.where(mask, value, variable))
        updated = self.strategy.gather_parts(part.read_value(), parts, self._place)
        for variable, value in zip(variables, updated, strict=True):
            variable.assign(value)
        for own, table, gradient in zip(self._tables, tables, of_tables, strict=True):
            own.put(table, gradient)

    def _own_part(self, gradient: Any, variable: Any) -> Any:
        """Returns this worker's part of a gradient; rank 0 gets all of a gradient that is no sum."""
        tf = require_tensorflow()
        if gradient is None:
            return tf.zeros_like(variable)  # Keras skips it; `_without_gradient` puts it back
        part = rows.part_of(gradient)
        if part is None:
            # All ranks must read it: a rank that does not read it does not exchange it either.
            part = tf.convert_to_tensor(gradient)
            part *= tf.cast(self._adds_whole, part.dtype)
        # Some gradients, such as layer normalization's, have an unknown shape when traced.
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
        """Returns the elements that a step must not change: the loss does not depend on them.

        Returns:
            A list of tuples: variable, its value, and a mask of the elements to put back.
        """
        tf = require_tensorflow()
        if not any(absent):
            return []
        flags = [tf.fill(v.shape, gone) for gone, v in zip(absent, locals_, strict=True)]
        mask = self._part_of(flags)
        own = [self.part, *(self._slots[name][0] for name, _ in self.shards.dense.slots)]
        parts = [keras_common.tf_variable(v) for v in own]
        return [(variable, variable.read_value(), mask) for variable in parts]


class _TablePart:
    """This worker's rows of the table of an embedding.

    Args:
        strategy: `strategy.WorkerStrategy` with a group.
        table: `tf.Variable`.
        sums: whether the optimizer takes each row's gradient as a sum; each worker can send sums.
        by_touch: whether a sparse gradient changes only the rows that it names.

    Attributes:
        part: the Keras variable that holds these rows.
        elements: tuple of int, its first element in the table, and the element after its last.
    """

    def __init__(self, strategy: Any, table: Any, sums: bool, by_touch: bool) -> None:
        tf = require_tensorflow()
        self._strategy, self._sums, self._by_touch = strategy, sums, by_touch
        self._place = strategy.place_for(self)
        rows_of_table, *self._rest = table.shape
        self._bounds = strategy.part_of(rows_of_table)
        row = table.shape.num_elements() // rows_of_table
        self.elements = (self._bounds[0] * row, self._bounds[1] * row)
        count = self._bounds[1] - self._bounds[0]
        self.part = generation().make_variable(tf.zeros([count, *self._rest], table.dtype), "rows")

    def take(self, table: Any) -> None:
        """Copies the rows from the table."""
        keras_common.tf_variable(self.part).assign(table[self._bounds[0] : self._bounds[1]])

    def of(self, gradient: Any) -> Any:
        """Returns these rows' part of the table's gradient, sparse or dense; None stays None."""
        tf = require_tensorflow()
        first, end = self._bounds
        if gradient is None:
            return None
        if not isinstance(gradient, tf.IndexedSlices):  # other code also reads the table
            return tf.convert_to_tensor(gradient)[first:end]
        if self._sums:
            gradient = joined_of_sums(gradient)
        indices = gradient.indices
        own = tf.where((indices >= first) & (indices < end))[:, 0]
        return tf.IndexedSlices(
            tf.gather(gradient.values, own),
            tf.gather(indices, own) - tf.cast(first, indices.dtype),
            tf.constant([end - first, *self._rest], tf.int64),
        )

    def put(self, table: Any, gradient: Any) -> None:
        """Joins all ranks' rows in the table, after an update with the result of `of`."""
        tf = require_tensorflow()
        part = keras_common.tf_variable(self.part)
        if self._by_touch and isinstance(gradient, tf.IndexedSlices):
            rows = tf.unique(tf.cast(gradient.indices, tf.int64))[0]  # a batch may name a row often
            values = tf.gather(part, rows)
            self._strategy.update_rows(table, rows + self._bounds[0], values, self._place)
        else:
            parts = self._strategy.gather_parts(part.read_value(), [table], self._place)
            table.assign(parts[0])


def pieces_of(bounds: tuple[int, int], shapes: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Maps a part of several arrays, seen as one vector, to pieces of the arrays.

    Args:
        bounds: the part's first element and the element after its last.

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
