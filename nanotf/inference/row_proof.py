"""Proves that rows of several requests may be computed in one batch.

Each row of every output must depend on the same row of the inputs alone. The proof is that of
`nanotf.region.proof`, by which workers divide the batches of a training, without its gradients: the
function's graph is copied for two numbers of rows, primes that no length in it is a multiple of,
and each tensor gets a state. Code of the model may be unknown: the graph is all that is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import graphs
from nanotf.console import logger

# Primes for axes of unknown length. Large ones first: a length that a constant in the graph is a
# multiple of proves nothing. Small ones for models that take no longer rows.
_LENGTHS = (
    (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283, 293),
    (29, 31, 37, 41, 43, 47, 53, 59, 61),
    (2, 3, 5, 7, 11, 13),
)


def reason_to_keep_together(function: Any) -> str:
    """Returns why a request's rows must be computed by themselves; empty if rows are apart.

    Nothing is guessed: a function of which no proof is found gives a reason, too.

    Args:
        function: `tf.ConcreteFunction`, as a signature of a SavedModel, that takes tensors by name
            and returns a dict of them.

    Returns:
        A clause that names the input, the output or the operation, such as "Mean (model/centre)
        combines rows with a sum or mean over rows".
    """
    from nanotf.region.proof.states import Coupled

    free = len(function.inputs) - len(function.captured_inputs)
    inputs = function.inputs[:free]
    try:
        _check_inputs(inputs, sorted(function.structured_input_signature[1]))
        known = _lengths_in(function.graph)
        rows = _sizes(known)
        error: Exception | None = None
        for shapes in _shapes(inputs, known):
            try:
                return _reason(function, inputs, shapes, rows)
            except Coupled:
                raise
            except Exception as failed:
                # An operation may refuse these lengths, and take others. What raises for all of
                # them is not proved, and computed by itself, which is always right.
                error = error or failed
    except Coupled as coupled:
        return str(coupled)
    if error is None:
        return "its lengths are multiples of all the lengths that nanotf tries"
    logger.info("A signature cannot be traced: %r", error, exc_info=error)
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return f"its graph takes no other lengths: {type(error).__name__}: {said}"


def _check_inputs(inputs: Sequence[Any], names: Sequence[str]) -> None:
    from nanotf.region.proof.states import Coupled

    if not inputs:
        raise Coupled("it takes no tensors")
    for tensor, name in zip(inputs, names, strict=True):
        if tensor.shape.rank is None:
            raise Coupled(f"its input {name!r} may have any number of axes")
        if tensor.shape.rank == 0 or tensor.shape[0] is not None:
            raise Coupled(f"its input {name!r} has the shape {tuple(tensor.shape)}, without rows")


def _lengths_in(graph: Any) -> set[int]:
    """Returns the lengths of axes in a graph, and its constant whole numbers."""
    found: set[int] = set()
    for _, tensor in graphs.captured(graph):
        found.update(_lengths_of_variable(tensor))
    for operation in graphs.all_operations(graph):
        for tensor in operation.outputs:
            if tensor.shape.rank:
                found.update(length for length in tensor.shape if length)
        if operation.type == "Const" and operation.outputs[0].dtype.is_integer:
            value = graphs.constant(operation.outputs[0], lambda _: None, 1)
            found.update(abs(int(number)) for number in value.flat[:1000] if number)
    return found


def _lengths_of_variable(handle: Any) -> Iterator[int]:
    for consumer in handle.consumers():
        if consumer.type == "ReadVariableOp" and consumer.outputs[0].shape.rank:
            yield from (length for length in consumer.outputs[0].shape if length)


def _sizes(known: set[int]) -> tuple[int, int]:
    from nanotf.region.proof import traces

    return traces.sizes(known)


def _shapes(inputs: Sequence[Any], known: set[int]) -> Iterator[list[list[int]]]:
    """Yields shapes of the inputs' rows to try, in order.

    First each axis of unknown length gets a length of its own, then all get the same: a mask is as
    long as the text that it belongs to.
    """
    shapes = [list(tensor.shape[1:]) for tensor in inputs]
    count = sum(length is None for shape in shapes for length in shape)
    if not count:
        yield shapes
        return
    for primes in _LENGTHS:
        free = [prime for prime in primes if all(length % prime for length in known)]
        choices = [free[:count]] if count > 1 and len(free) >= count else []
        choices += [[free[0]] * count] if free else []
        for chosen in choices:
            lengths = iter(chosen)
            yield [[next(lengths) if d is None else d for d in shape] for shape in shapes]


def _reason(
    function: Any, inputs: Sequence[Any], shapes: Sequence[list[int]], rows: tuple[int, int]
) -> str:
    from nanotf.region.proof import shaped_copies, traces, verdicts
    from nanotf.region.proof.states import UNKNOWN

    leaves = [
        traces.Argument(tuple(shape), tensor.dtype, True)
        for tensor, shape in zip(inputs, shapes, strict=True)
    ]
    trace = functools.partial(
        traces.trace,
        lambda *tensors: (shaped_copies.copy(function.graph, tensors), {}),
        list,
        (tuple(leaves), {}),
        leaves,
    )
    traced, again = trace(rows[0]), trace(rows[1])
    reader = verdicts.read(traced, again, any_number=True)
    for operation in graphs.all_operations(traced.graph):
        if _does_more(operation):
            return f"{_named(operation)} does more than compute a result"
    names = sorted(function.structured_outputs)
    for name, tensor in zip(names, traced.outputs, strict=True):
        state = reader.of(tensor)
        if state.kind == UNKNOWN:
            return f"{_named(state.of.operation)} {state.of.text}"
        if not (state.is_plain() and state.is_rows and (state.axis, state.each) == (0, 1)):
            return f"its output {name!r} has no row for each row of the inputs"
    return ""


def _does_more(operation: Any) -> bool:
    """Returns True for operations such as assignments: later requests meet what they leave."""
    if operation.type in ("Assert", "NoOp") or graphs.functions_of(operation):
        return False
    return graphs.has_effects(operation)


def _named(operation: Any) -> str:
    return f"{operation.type} ({operation.name})"
