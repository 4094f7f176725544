"""Decides if a call of a layer may be divided, and how its results are put together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import (
    graphs,
    keras_common,
    keras_compiling,
    keras_layers,
    keras_models,
    variable_handles,
)
from nanotf.console import logger
from nanotf.region import scope, variables
from nanotf.region.proof import graph_reader, lengths, traces
from nanotf.region.proof.states import (
    EQUAL,
    PARTIAL,
    ROWS,
    UNKNOWN,
    WHOLE,
    Coupled,
    Reason,
    TensorState,
)
from nanotf.region.rows import Division, rows_of


@dataclasses.dataclass(frozen=True)
class Along:
    """The place of an output's rows that are not along its first axis, as in stacked states."""

    axis: int  # at least 1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings of a proof: if a call may be divided, and how."""

    whole: str = ""  # why the call cannot be divided; empty if it can
    # Per output the number of its rows per row of the batch, `Along` another axis, "mean", "sum",
    # or None for a value equal on all workers. None in place of the tuple: 1 for each, as the user
    # declares.
    factors: tuple[Any, ...] | None = ()
    losses: tuple[Any, ...] = ()  # the same for each value that the layer gives to `add_loss`
    # One per draw of random numbers in the call, in order, whether it has rows.
    draws: tuple[bool, ...] = ()
    # One per statistics that normalize values, in order, whether they are over rows.
    statistics: tuple[bool, ...] = ()
    variables: tuple[Any, ...] = ()  # the trainable `tf.Variable`s that the call reads
    # Plain variables of which all workers look up the same rows, such as the positions of a
    # sequence.
    positions: tuple[Any, ...] = ()
    # Pairs of a `tf.Variable` that the call assigns and the kind of its change, "mean" or "sum"
    # over rows. Omits variables whose change is equal for any rows.
    assigned: tuple[tuple[Any, str], ...] = ()
    reads_behind: bool = False  # whether it uses tensors that are not arguments
    # Whether it leaves tensors in attributes, see `noting`. Then `factors` has their factors after
    # those of the outputs.
    leaves_notes: bool = False
    operations: float | None = None  # see `wire.parts.Part`; here with those of all parts inside


def users_layers(layer: Any) -> list[Any]:
    """Returns the layers with user classes among a layer and the layers inside it."""
    return [v for v in keras_common.flat_layers(layer) if not keras_common.is_keras_own(type(v))]


def noting(layer: Any, stock: Any) -> Any:
    """Makes a call return its outputs and the tensors it leaves in attributes of users' layers.

    Returns:
        A function that returns a tuple of the outputs and a dict of tensors, by the layer's place
        among `users_layers` and the attribute.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        layers = users_layers(layer)
        before = [keras_models.users_attributes(v) for v in layers]
        out = stock(layer, *args, **kwargs)
        notes = {
            (place, name): value
            for place, (v, known) in enumerate(zip(layers, before, strict=True))
            for name, value in keras_models.users_attributes(v).items()
            if value is not known.get(name) and isinstance(value, tf.Tensor)
        }
        return out, notes

    return call


@dataclasses.dataclass(frozen=True)
class Subject:
    """The call to prove: a layer's, or a function's of a loss or metric."""

    owner: Any  # the layer, loss or metric
    call: Callable[..., Any]  # returns its outputs and a dict of notes
    name: str  # for messages
    # Returns the variables that it may use.
    variables: Callable[[], Sequence[Any]] = tuple
    # Returns the lists that `add_loss` fills.
    lists_of_losses: Callable[[], list[list[Any]]] = list
    # Layers with user classes, whose attributes the call may change.
    layers: Sequence[Any] = ()


def layer_subject(layer: Any, stock: Any) -> Subject:
    """Returns the `Subject` of a layer's call by the stock `__call__`."""
    return Subject(
        layer,
        noting(layer, stock),
        layer.name,
        lambda: keras_layers.all_variables(layer),
        lambda: keras_layers.lists_of_losses(layer),
        users_layers(layer),
    )


_VERDICTS = "_nanotf_verdicts"  # attribute of a graph: those on calls in it, and nowhere else
# Weak, since verdicts hold variables, which must not outlive their layer.
_eager: weakref.WeakKeyDictionary[Any, dict[Any, Verdict]] = weakref.WeakKeyDictionary()
_MOST_CHANGES = 8  # proofs for one kind of arguments
_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # owners of which a warning was given


def verdict_of(
    subject: Subject,
    args: Any,
    kwargs: Any,
    division: Division,
    is_data: Callable[[Any], bool],
) -> Verdict:
    """Returns the verdict on a call.

    Each graph has its own, since code may build another one next time. Eager calls of one kind
    share one until a number or text in an attribute of the user's changes.

    Args:
        args, kwargs: the call's arguments.
        division: of the batch.
        is_data: whether a leaf may have rows.
    """
    leaves = [_argument(leaf, division, is_data) for leaf in tf.nest.flatten((args, kwargs))]
    known_lengths = division.lengths
    key = (*map(_kind, leaves), known_lengths), _plain_attributes(subject)
    graph = scope.graph_here()
    if graph is None:
        known = _eager.setdefault(subject.owner, {})
    else:
        by_owner = getattr(graph, _VERDICTS, None)
        if by_owner is None:
            by_owner = weakref.WeakKeyDictionary()
            setattr(graph, _VERDICTS, by_owner)
        known = by_owner.setdefault(subject.owner, {})
    if key not in known:
        of_kind = [found for found in known if found[0] == key[0]]
        if len(of_kind) >= _MOST_CHANGES:  # each proof traces the call at least twice
            known[key] = Verdict(_of_changes([attributes for _, attributes in (*of_kind, key)]))
        else:
            known[key] = prove(subject, leaves, (args, kwargs), known_lengths)
    return known[key]


def _of_changes(found: Sequence[Any]) -> str:
    names = sorted({str(one[1]) for attributes in found for one in set(attributes) ^ set(found[0])})
    return (
        f"numbers or texts in its attributes change from call to call ({', '.join(names)}), and its "
        "code may depend on them"
    )


def warn_of_whole(subject: Subject, verdict: Verdict) -> None:
    """Warns once per layer that it runs undivided."""
    if subject.owner not in _warned:
        _warned.add(subject.owner)
        logger.warning(
            "%s runs undivided, on all rows, in every worker: %s. The results are right, but this "
            "part gets no faster.",
            subject.name,
            verdict.whole,
        )


def _argument(leaf: Any, division: Division, is_data: Callable[[Any], bool]) -> Any:
    """Returns what a trace replaces a leaf of the arguments by: an `Argument`, or the leaf."""
    is_tensor = isinstance(leaf, tf.Tensor) and not hasattr(leaf, "assign")
    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) or not (is_data(leaf) or is_tensor):
        return leaf
    shape = tf.TensorShape(leaf.shape)
    if shape.rank is None:
        return leaf
    has_rows = is_data(leaf) and division.has_rows(leaf)
    first = 1 if has_rows else 0
    own = rows_of(leaf)
    mask = keras_layers.mask_of(leaf)
    return traces.Argument(
        tuple(shape[first:]),
        tf.as_dtype(leaf.dtype),
        has_rows,
        None if mask is None else tuple(mask.shape[first:]),
        keras_layers.activation_behind(own.own if own is not None and has_rows else leaf),
    )


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, traces.Argument):
        return dataclasses.astuple(leaf)
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return type(leaf), leaf  # the type, too: 1, 1.0 and True are equal keys
    return str(type(leaf))


def _plain_attributes(subject: Subject) -> Any:
    """Returns the numbers and texts in the user's attributes, which may change what code does."""
    found = [keras_models.users_attributes(layer) for layer in subject.layers]
    # Without layers of users' classes, as in a loss, the owner's own attributes count.
    found += [] if found or not hasattr(subject.owner, "__dict__") else [vars(subject.owner)]
    return tuple(
        (place, name, value)
        for place, attributes in enumerate(found)
        for name, value in attributes.items()
        if isinstance(value, (bool, int, float, str, type(None)))
    )


def prove(
    subject: Subject, leaves: Sequence[Any], like: Any, lengths_here: Sequence[int] = ()
) -> Verdict:
    """Traces a call and its gradient, and judges them.

    Args:
        leaves: the arguments' leaves; `traces.Argument` for each that a trace replaces.
        like: the structure of the arguments, a pair of a tuple and a dict.
        lengths_here: the numbers of rows that the call is traced with, if known.
    """
    operations = None
    try:
        with _as_before(subject.layers), keras_compiling.kept_random_states(subject.owner):
            if any(isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) for leaf in leaves):
                raise Coupled(
                    "it gets a ragged or sparse tensor, whose rows nanotf does not follow"
                )
            with variable_handles.VariableReads() as used:
                traced, again = _traced_twice(subject, like, leaves, lengths_here)
            operations = traced.operations()
            return dataclasses.replace(
                _judged(subject, traced, again, used.variables), operations=operations
            )
    except Coupled as coupled:
        return Verdict(str(coupled), operations=operations)
    except Exception as error:
        # The user's code may raise anything for other lengths. To run whole is always right.
        logger.info("%s cannot be traced: %r", subject.name, error, exc_info=True)
        line = graphs.line_that_raised(error)
        place = f" in {line[0]}, line {line[1]}" if line else ""
        said = str(error).strip().partition("\n")[0]
        text = f"{type(error).__name__}{place}" + (f": {said}" if said else "")
        return Verdict(f"its call cannot be traced: {text.rstrip('.')}")


def read(traced: traces.Trace, again: traces.Trace) -> graph_reader.Reader:
    """Gives states to the tensors of a trace.

    Args:
        again: a trace of the same call with another number of rows.

    Raises:
        Coupled: They are not the same operations.
    """
    rows, other_rows = traced.tracing.rows, again.tracing.rows
    readers = graph_reader.Reader(rows, traces.twins(traced, again), other_rows)
    readers.exchanged = traced.tracing.exchanged
    readers.give(traced.tracing.states)
    readers.give(traces.handle_states(traced))
    readers.read(traced.graph)
    return readers


def _judged(
    subject: Subject, traced: traces.Trace, again: traces.Trace, used: Sequence[Any]
) -> Verdict:
    readers = read(traced, again)
    _check_parts(readers, traced)
    results = [*traced.outputs, *traced.losses]
    states = [readers.of(t) if tf.is_tensor(t) else EQUAL for t in results]
    factors = [factor(state, t) for state, t in zip(states, results, strict=True)]
    assigned = _assigned(subject, readers)
    gradients = traces.differentiate(traced, states)
    if traced.tracing.has_users_gradients(traced.graph):
        # Code of a gradient may use the number of rows as a Python number.
        traces.differentiate(again, states)
        readers.add_twins(traces.twins(traced, again))
    # Once more, for the operations of the gradient.
    readers.give(traced.tracing.states)
    readers.read(traced.graph)
    positions = _check_gradients(readers, traced, gradients)
    if readers.failures:
        raise Coupled(_told(readers.failures[0]))
    for tensor in traced.outputs:
        _check_mask(readers, tensor)
    return Verdict(
        factors=tuple(factors[: len(traced.outputs)]),
        losses=tuple(factors[len(traced.outputs) :]),
        draws=tuple(traced.tracing.draws),
        statistics=tuple(traced.tracing.statistics),
        variables=tuple(used),
        positions=tuple(v for v in map(variables.plain, used) if id(v.handle) in positions),
        assigned=assigned,
        reads_behind=any(t.dtype.is_floating for _, t in graphs.captured(traced.graph)),
        leaves_notes=bool(traced.notes),
    )


def _traced_twice(
    subject: Subject,
    like: Any,
    leaves: Sequence[Any],
    lengths_here: Sequence[int],
) -> tuple[traces.Trace, traces.Trace]:
    """Traces a call with two numbers of rows, and other unknown lengths replaced if it takes them.

    Raises:
        Coupled: With one of the known numbers of rows it does something else.
    """

    sizes = _sizes(subject, leaves)

    def traced_with(length: int | None) -> tuple[traces.Trace, traces.Trace]:
        trace = functools.partial(traces.trace, subject.call, subject.lists_of_losses, like, leaves)
        one = trace(sizes[0], length)
        two = trace(sizes[1], length, one.tracing.decisions)
        for rows in lengths_here:
            lengths.check(one, two, trace(rows, length, one.tracing.decisions))
        return one, two

    are_known = all(None not in a.shape for a in leaves if isinstance(a, traces.Argument))
    try:
        return traced_with(traces.LENGTH)
    except Coupled:
        raise
    except Exception:
        if are_known:
            raise
        return traced_with(None)


def _check_parts(readers: graph_reader.Reader, traced: traces.Trace) -> None:
    """Raises `Coupled` if layers that are proved by themselves get other inputs than they may."""
    for part in traced.tracing.parts:
        for tensor, argument in part.inputs:
            mask = keras_layers.mask_of(tensor)
            for each in (tensor, *(() if mask is None else (mask,))):
                state = readers.of(each)
                if state.kind == UNKNOWN:
                    raise Coupled(_told(state.of))
                if state.power or state.kind != (ROWS if argument.has_rows else WHOLE):
                    raise Coupled(_told(Reason(each.op, "gives a layer a sum over rows")))


def _assigned(subject: Subject, readers: graph_reader.Reader) -> tuple[tuple[Any, str], ...]:
    by_handle = {id(v.handle): v for v in map(variables.plain, subject.variables())}
    if not readers.changes.keys() <= by_handle.keys():
        raise Coupled("it adds sums over rows to a variable that is not the layer's")
    return tuple((by_handle[key], kind) for key, kind in readers.changes.items())


def _sizes(subject: Subject, leaves: Sequence[Any]) -> tuple[int, int]:
    """Returns the first two primes that no known length is a multiple of."""
    lengths = [d for v in subject.variables() for d in v.shape if d]
    lengths += [d for leaf in leaves if isinstance(leaf, traces.Argument) for d in leaf.shape if d]
    return traces.sizes(lengths)


def _told(reason: Reason) -> str:
    """Returns a phrase that names an operation, its layer and the user's line, and says why."""
    operation = reason.operation
    line = graphs.line_of(operation)
    place = f" in {line[0]}, line {line[1]}" if line else ""
    return f"{operation.type} ({operation.name}){place} {reason.text}"


def factor(state: TensorState, tensor: Any) -> Any:
    """Returns how a result leaves the region; see `Verdict.factors` and `regions.Region.leave`.

    Raises:
        Coupled: It cannot, since its state is none that can be joined.
    """
    if state.kind == UNKNOWN:
        raise Coupled(_told(state.of))
    if not tf.is_tensor(tensor):
        return None
    if state.is_rows and not state.power and not (state.strided and state.each > 1):
        if state.axis == 0:
            return state.each
        if state.each == 1:
            return Along(state.axis)
    if state.kind == PARTIAL and not state.power:
        return "sum"
    if state.kind == PARTIAL and state.power == -1 and tensor.dtype.is_floating:
        return "mean"
    if state.kind == WHOLE and not state.power:
        return None
    if state.kind == WHOLE and state.power == 1:
        return "sum"
    raise Coupled(_told(Reason(tensor.op, "makes a result from the number of rows")))


def _check_gradients(
    readers: graph_reader.Reader, traced: traces.Trace, found: traces.Gradients
) -> set[int]:
    """Raises `Coupled` if a gradient is neither rows nor a sum over rows.

    Returns:
        The `id` of each variable's handle of which all workers look up the same rows.
    """
    have_rows = [argument.has_rows for _, argument in traced.inputs]
    have_rows += [True for part in traced.tracing.parts for _ in part.outputs]
    pairs = [(None, *pair) for pair in zip(found.inputs, have_rows, strict=True)]
    pairs += [(outer, gradient, False) for outer, gradient in found.captured]
    positions = set()
    for outer, gradient, has_rows in pairs:
        if isinstance(gradient, tf.IndexedSlices):
            if not _is_of_rows(readers, gradient):
                positions.add(id(outer))
        elif gradient is not None:
            _check_gradient(readers, gradient, has_rows)
    if any(id(handle) in positions for part in traced.tracing.parts for handle in part.handles):
        raise Coupled("it looks up rows and positions in one table")
    return positions


def _check_gradient(readers: graph_reader.Reader, gradient: Any, has_rows: bool) -> None:
    state = readers.of(gradient)
    if state.kind == UNKNOWN:
        raise Coupled("in its gradient, " + _told(state.of))
    is_zero = state.kind == WHOLE and state.power is None
    if has_rows:
        is_right = state.is_rows and not state.power and (state.axis, state.each) == (0, 1)
    else:
        is_right = state.kind == PARTIAL and not state.power
        is_right |= state.kind == WHOLE and state.power == 1
    if not (is_right or is_zero):
        text = "makes no row of each row" if has_rows else "makes no sum over rows"
        raise Coupled("in its gradient, " + _told(Reason(gradient.op, text)))


def _is_of_rows(readers: graph_reader.Reader, gradient: Any) -> bool:
    """Returns True for look-ups of each worker's own rows, False for those that all make."""
    values, indices = readers.of(gradient.values), readers.of(gradient.indices)
    for state in (values, indices):
        if state.kind == UNKNOWN:
            raise Coupled("in its gradient, " + _told(state.of))
    if values.is_rows and not values.power and indices.is_plain():
        return True
    if indices == EQUAL and values.kind == PARTIAL and not values.power:
        return False
    text = "mixes look-ups of rows with others"
    raise Coupled("in its gradient, " + _told(Reason(gradient.values.op, text)))


def _check_mask(readers: graph_reader.Reader, tensor: Any) -> None:
    mask = keras_layers.mask_of(tensor) if tf.is_tensor(tensor) else None
    if mask is not None:
        of_mask, of_tensor = readers.of(mask), readers.of(tensor)
        if of_mask.kind == UNKNOWN:
            raise Coupled(_told(of_mask.of))
        if of_tensor.is_rows and (not of_mask.is_rows or of_mask.axis != 0):
            raise Coupled("its mask has no rows")


@contextlib.contextmanager
def _as_before(layers: Sequence[Any]) -> Iterator[None]:
    """Restores the attributes of users' layers in which a trace has left numbers or tensors."""
    before = [keras_models.users_attributes(v) for v in layers]
    lists = [
        (value, list(value) if isinstance(value, list) else dict(value))
        for known in before
        for value in known.values()
        if type(value) in (list, dict)
    ]
    try:
        yield
    finally:
        for inner, known in zip(layers, before, strict=True):
            _restore(inner, known)
        for value, content in lists:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _restore(layer: Any, before: dict[str, Any]) -> None:
    for name, value in keras_models.users_attributes(layer).items():
        if value is not before.get(name) and isinstance(
            value, (int, float, str, tf.Tensor, np.generic, type(None))
        ):
            if name in before:
                vars(layer)[name] = before[name]
            else:
                del vars(layer)[name]
