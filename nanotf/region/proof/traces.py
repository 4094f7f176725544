"""Traces a layer's call and its gradient, for a number of rows that no other length is like."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import graphs, keras_layers
from nanotf.region import scope
from nanotf.region.proof.states import (
    EQUAL,
    HANDLE,
    PARTIAL,
    ROWS,
    WHOLE,
    Coupled,
    TensorState,
)

# Pairs of primes: of a length that is a multiple of one, that many rows are the batch's.
SIZES = ((1009, 2003), (1013, 2011), (1019, 2017), (1021, 2027))
LENGTH = 13  # of other axes of unknown length, also a prime


def sizes(lengths: Iterable[int]) -> tuple[int, int]:
    """Returns two numbers of rows that no known length is a multiple of.

    Raises:
        Coupled: There are none among `SIZES`.
    """
    known = set(lengths)
    for pair in SIZES:
        if all(length % rows for length in known for rows in pair):
            return pair
    raise Coupled("its lengths are multiples of all the numbers of rows that nanotf tries")


@dataclasses.dataclass(frozen=True)
class Argument:
    """A leaf of a call's arguments that a trace replaces."""

    shape: tuple[int | None, ...]  # its shape without rows
    dtype: Any  # `tf.DType`
    has_rows: bool
    # The shape without rows of the mask that Keras has put on it; None if there is none.
    mask: tuple[int | None, ...] | None = None
    # The operation behind it, which losses look for; None if there is none that they do.
    activation: keras_layers.Activation | None = None

    @classmethod
    def of(cls, tensor: Any, rows: int) -> Argument | None:
        """Describes a tensor of a trace by its shape; None if that is not enough."""
        masked = keras_layers.mask_of(tensor)
        shape = None if tensor.shape.rank is None else tuple(tensor.shape)
        # With a second axis as long as the rows, nothing tells which one is theirs.
        if shape is None or None in shape or any(d % rows == 0 for d in shape[1:]):
            return None
        has_rows = shape[:1] == (rows,)
        first = 1 if has_rows else 0
        mask = None if masked is None else tuple(masked.shape[first:])
        if (not has_rows and shape and shape[0] % rows == 0) or (mask and None in mask):
            return None
        activation = keras_layers.activation_behind(tensor)
        return cls(shape[first:], tensor.dtype, has_rows, mask, activation)

    def made(self, tracing: Tracing, length: int | None = None) -> tuple[Any, Any]:
        """Makes a placeholder; returns it, and the tensor for code to use."""
        state = TensorState(ROWS) if self.has_rows else EQUAL
        found = placeholder = self._placeholder(self.shape, self.dtype, tracing, length)
        tracing.give(placeholder, state)
        if self.activation is not None:
            found = self.activation.applied_to(placeholder)
        if self.mask is not None:
            mask = self._placeholder(self.mask, tf.bool, tracing, length)
            tracing.give(mask, state)
            keras_layers.set_mask(found, mask)
        return placeholder, found

    def _placeholder(self, shape: Any, dtype: Any, tracing: Tracing, length: int | None) -> Any:
        shape = [length if d is None else d for d in shape]
        shape = [tracing.rows, *shape] if self.has_rows else shape
        return tf.compat.v1.placeholder(dtype, shape)


class Tracing:
    """A trace while it is made: `scope.proof`. The code of a region's operators tells it of states.

    Args:
        repeated: the `decisions` of another trace, which this one repeats; None to decide anew.

    Attributes:
        decisions: list, what code outside the graph has decided by the number of rows, in order.
    """

    def __init__(self, rows: int, repeated: list[Any] | None = None) -> None:
        self.rows = rows
        self._repeated = None if repeated is None else iter(repeated)
        self.decisions: list[Any] = []
        self.states: dict[int, TensorState] = {}  # of tensors, by id
        self.exchanged: set[int] = set()
        self.draws: list[bool] = []  # per draw of random numbers, whether it has rows
        self.statistics: list[bool] = []  # per statistics, whether they are over rows
        self.parts: list[ProvedCall] = []
        self._own: set[Any] = set()  # names of operations made by `exchange`
        self._keep: list[Any] = []  # tensors whose ids are keys: no other may get such an id

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Returns a decision, that of the repeated trace if there is one."""
        if self._repeated is None:
            self.decisions.append(decide())
            return self.decisions[-1]
        for found in self._repeated:
            return found
        raise Coupled("it calls other layers each time")

    def note_draw(self, drawn: Any, others: Sequence[Any]) -> None:
        """Registers random numbers that a region draws for the whole batch.

        Args:
            drawn: tensor, the numbers.
            others: the arguments of the draw that may have rows.
        """
        known = list(drawn.shape) if drawn.shape.rank else []
        has_rows = known[:1] == [self.rows]
        self.draws.append(has_rows)
        are_numbers = all(not tf.is_tensor(x) or x.shape.rank == 0 for x in others)
        if has_rows and are_numbers and all(d and d % self.rows for d in known[1:]):
            self.give(drawn, TensorState(ROWS))

    def give(self, tensor: Any, state: TensorState) -> None:
        """Sets a tensor's state."""
        self.states[id(tensor)] = state
        self._keep.append(tensor)

    def note_statistics(self, x: Any, axes: Sequence[Any]) -> bool:
        """Registers statistics of a tensor over axes; returns True if rows are along one of them."""
        lengths = [x.shape[int(axis)] for axis in axes] if x.shape.rank else []
        over = self.decided(lambda: any(d and d % self.rows == 0 for d in lengths))
        self.statistics.append(over)
        return bool(over)

    def exchange(self, value: Any) -> Any:
        """Stands for an exchange that turns a sum or mean over own rows into the batch's."""

        @tf.custom_gradient
        def exchanged(value: Any) -> Any:
            return self._marked(value), self._marked

        out = exchanged(value)
        self._own.add(out.op.name)  # else its gradient would count as the user's
        return out

    def _marked(self, value: Any) -> Any:
        out = tf.identity(value)
        self.exchanged.add(id(out))
        self._keep.append(out)
        return out

    def has_users_gradients(self, graph: Any) -> bool:
        """Returns True if Python code that may use the number of rows defines a gradient."""
        return any(
            operation.name not in self._own and graphs.has_own_gradient(operation)
            for operation in graphs.all_operations(graph)
        )


@dataclasses.dataclass
class ProvedCall:
    """A call of a layer that is proved by itself."""

    # Pairs of a tensor and the `Argument` that its proof is about.
    inputs: list[tuple[Any, Argument]]
    outputs: list[Any]  # placeholders for its outputs, with rows
    handles: list[Any]  # the handles of its trainable variables, which it reads for rows
    operations: float  # its floating-point operations for one row


@dataclasses.dataclass
class Trace:
    """The graph of a call."""

    tracing: Tracing
    graph: Any  # the graph, with the gradient if `differentiate` was called
    inputs: list[tuple[Any, Argument]]  # pairs of a placeholder and its `Argument`
    # Tensors: those that the call returned, then those left in attributes.
    outputs: list[Any]
    notes: Any  # dict of tensors, see `verdicts.noting`
    losses: list[Any]  # tensors, given to `add_loss`

    def operations(self) -> float:
        """Returns the floating-point operations for one row, with those of proved calls."""
        inside = sum(part.operations for part in self.tracing.parts)
        return graphs.all_float_operations(self.graph) / self.tracing.rows + inside


def trace(
    call: Callable[..., Any],
    losses_of: Callable[[], list[list[Any]]],
    like: Any,
    leaves: Sequence[Any],
    rows: int,
    length: int | None = LENGTH,
    repeated: list[Any] | None = None,
) -> Trace:
    """Traces a call.

    Args:
        call: returns its outputs and a dict of notes.
        losses_of: returns the lists that `add_loss` fills.
        like: the structure of the arguments, a pair of a tuple and a dict.
        leaves: the arguments' leaves; `Argument` for each that is replaced.
        length: of other axes of unknown length; None leaves them unknown.
        repeated: see `Tracing`.

    Raises:
        Coupled: The outputs are no tensors.
    """
    graph, tracing = graphs.new_graph("proof"), Tracing(rows, repeated)
    inputs: list[tuple[Any, Argument]] = []
    # The user's code runs once more for a proof, and must not print once more.
    with graph.as_default(), scope.proving(tracing), contextlib.redirect_stdout(io.StringIO()):
        made = []
        for leaf in leaves:
            if isinstance(leaf, Argument):
                placeholder, found = leaf.made(tracing, length)
                inputs.append((placeholder, leaf))
                leaf = found
            made.append(leaf)
        args, kwargs = tf.nest.pack_sequence_as(like, made)
        with _new_in(losses_of) as losses:
            out, notes = call(*args, **kwargs)
    outputs = tf.nest.flatten((out, notes))
    for leaf in outputs:
        if not isinstance(
            leaf, (tf.Tensor, int, float, bool, str, type(None), np.ndarray, np.generic)
        ):
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise Coupled(f"it returns an object of class {kind}, whose rows nanotf cannot join")
    return Trace(tracing, graph, inputs, outputs, notes, losses)


@contextlib.contextmanager
def _new_in(lists_of: Callable[[], list[list[Any]]]) -> Iterator[list[Any]]:
    """Collects what code in this context appends to lists, and removes it from them.

    Keras 2 replaces the lists at a call.
    """
    known = {id(value) for found in lists_of() for value in found}
    new: list[Any] = []
    try:
        yield new
    finally:
        for found in lists_of():
            new += [value for value in found if id(value) not in known and tf.is_tensor(value)]
            found[:] = [value for value in found if id(value) in known]


def twins(one: Trace, other: Trace) -> dict[int, Any]:
    """Pairs the tensors of two traces, which must consist of the same operations.

    Raises:
        Coupled: They differ.
    """
    pairs: dict[int, Any] = {}
    found = [list(graphs.all_operations(t.graph)) for t in (one, other)]
    for mine, theirs in zip(*found, strict=False):
        if mine.type != theirs.type:
            raise Coupled(
                f"its operations depend on the number of rows: {mine.type}, {theirs.type}"
            )
        for tensor, twin in zip(mine.outputs, theirs.outputs, strict=True):
            pairs[id(tensor)] = twin
    if len(found[0]) != len(found[1]):
        raise Coupled("its operations depend on the number of rows")
    return pairs


@dataclasses.dataclass
class Gradients:
    """Gradients of a call."""

    # Tensors or None, with respect to `Trace.inputs`, then to the outputs of `Tracing.parts`.
    inputs: list[Any]
    # Pairs of a tensor from outside the call and the gradient.
    captured: list[tuple[Any, Any]]


def differentiate(traced: Trace, states: Sequence[TensorState]) -> Gradients:
    """Adds the gradient of a call to its graph.

    Args:
        states: of its outputs and losses.
    """
    results = [*traced.outputs, *traced.losses]
    chosen, upstream = [], []
    with traced.graph.as_default(), scope.proving(traced.tracing):
        for tensor, state in zip(results, states, strict=True):
            if tf.is_tensor(tensor) and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                given = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                traced.tracing.give(given, upstream_of(state))
                chosen.append(tensor)
                upstream.append(given)
        # The graph lacks the gradients of proved layers: placeholders replace what comes from them.
        for part in traced.tracing.parts:
            for tensor, argument in part.inputs:
                if tensor.dtype.is_floating or tensor.dtype.is_complex:
                    given = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                    traced.tracing.give(
                        given, TensorState(ROWS) if argument.has_rows else TensorState(PARTIAL)
                    )
                    chosen.append(tensor)
                    upstream.append(given)
        pairs = graphs.captured(traced.graph)
        inputs = [tensor for tensor, _ in traced.inputs]
        inputs += [tensor for part in traced.tracing.parts for tensor in part.outputs]
        sources = [*inputs, *(inner for _, inner in pairs)]
        places = [i for i, tensor in enumerate(sources) if _is_differentiable(tensor)]
        found: list[Any] = [None] * len(sources)
        if chosen and places:
            made = tf.gradients(
                chosen, [sources[i] for i in places], upstream, unconnected_gradients="none"
            )
            for place, gradient in zip(places, made, strict=True):
                found[place] = gradient
    count = len(inputs)
    return Gradients(
        found[:count],
        [(outer, gradient) for (outer, _), gradient in zip(pairs, found[count:], strict=True)],
    )


def _is_differentiable(tensor: Any) -> bool:
    # The gradient of a handle is that of its variable.
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.resource)


def upstream_of(state: TensorState) -> TensorState:
    """Returns the state of the gradient that arrives at a result, by how workers combine it.

    Rows are joined, so each worker gets its rows of the gradient. Of a sum each gets the gradient,
    of a mean and of a value that is equal on all workers its share of it.
    """
    if state.is_rows:
        return dataclasses.replace(state, power=EQUAL.power)
    is_sum = state.kind == PARTIAL and not state.power
    assert EQUAL.power is not None
    return TensorState(WHOLE, EQUAL.power if is_sum else EQUAL.power + 1)


def handle_states(traced: Trace) -> dict[int, TensorState]:
    """Returns the states of a graph's captured tensors: handles of variables, or whole values."""
    return {
        id(inner): TensorState(HANDLE, of=id(outer))
        if inner.dtype in (tf.resource, tf.variant)
        else EQUAL
        for outer, inner in graphs.captured(traced.graph)
    }
