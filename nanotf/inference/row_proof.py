"""Proves that rows of several requests may be computed in one batch.

Each row of every output must depend on the same row of the inputs alone. The proof is that of
`nanotf.region.proof`, by which workers divide the batches of a training, without its gradients: the
function's graph is copied for two numbers of rows, primes that no length in it is a multiple of,
and each tensor gets a state. Code of the model may be unknown: the graph is all that is read.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import graphs
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger

# Primes for axes of unknown length: those for axes that differ, then for axes of one length. Large
# ones come first: few constants are multiples of them. Small ones are for models that take no
# longer rows. They are smaller than the numbers of rows.
_DISTINCT = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_COMMON = ((211, 223, 227, 229, 233, 239, 241, 251, 257, 263), _DISTINCT, (13, 11, 7, 5, 3, 2))


def reasons(folder: pathlib.Path) -> dict[str, str]:
    """Returns the reasons for the signatures of a SavedModel, see `reason_to_keep_together`."""
    model = require_tensorflow().saved_model.load(str(folder))
    return {name: reason_to_keep_together(each) for name, each in model.signatures.items()}


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

    # The captured tensors, such as variables, come last.
    free = len(function.inputs) - len(function.captured_inputs)
    inputs = function.inputs[:free]
    try:
        # TensorFlow flattens a dict by its sorted keys: the inputs, and the outputs below.
        _check_inputs(inputs, sorted(function.structured_input_signature[1]))
        # A length that is a multiple of a number of rows would look like rows.
        known = _lengths_in(function.graph)
        rows = _sizes(known)
        error: Exception | None = None
        for lengths, shapes in _shapes(inputs, known):
            try:
                return _reason(function, inputs, shapes, rows)
            except Coupled:
                raise
            except Exception as failed:
                # An operation may refuse these lengths, and take others. What raises for all of
                # them is not proved, and computed by itself, which is always right.
                error = error or failed
                if len(set(lengths)) > 1 and _takes(function, inputs, shapes, math.prod(lengths)):
                    break
    except Coupled as coupled:
        return str(coupled)
    if error is None:
        return "its lengths are multiples of all the lengths that nanotf tries"
    logger.info("A signature cannot be traced: %r", error, exc_info=error)
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return f"its graph takes only some numbers of rows, or lengths: {type(error).__name__}: {said}"


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
        # Constants may be shapes or axes' lengths that an operation computes with.
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


def _shapes(
    inputs: Sequence[Any], known: set[int]
) -> Iterator[tuple[list[int], list[tuple[int, ...]]]]:
    """Yields lengths of the unknown axes to try, and the shapes of the inputs' rows with them.

    First each axis gets a length of its own, then all get the same: a mask is as long as the text
    that it belongs to.
    """
    shapes = [tuple(tensor.shape[1:]) for tensor in inputs]
    count = sum(length is None for shape in shapes for length in shape)
    choices = [_free(_DISTINCT, known)[:count]] if count > 1 else []
    choices += [_free(primes, known)[:1] * count for primes in _COMMON] if count else [[]]
    for chosen in choices:
        if len(chosen) == count:  # too few primes may be left
            lengths = iter(chosen)
            yield (
                chosen,
                [tuple(next(lengths) if d is None else d for d in shape) for shape in shapes],
            )


def _free(primes: Sequence[int], known: set[int]) -> list[int]:
    return [prime for prime in primes if all(length % prime for length in known)]


def _takes(
    function: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]], rows: int
) -> bool:
    """Returns True if some number of rows of these shapes can be computed.

    What TensorFlow refuses for a prime number of rows may be right for others, if it reshapes one
    input to the length of another. So two lengths may only be taken for one if it refuses them for
    a number of rows, too, that each is a divisor of.
    """
    from nanotf.region.proof import shaped_copies

    tf = require_tensorflow()
    if rows * max(map(math.prod, shapes)) >= 2**31:  # more than the shapes in graphs hold
        return True
    with graphs.new_graph("lengths").as_default():
        tensors = [
            tf.compat.v1.placeholder(tensor.dtype, [rows, *shape])
            for tensor, shape in zip(inputs, shapes, strict=True)
        ]
        try:
            shaped_copies.copy(function.graph, tensors)
        except ValueError:
            return False
    return True


def _reason(
    function: Any, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]], rows: tuple[int, int]
) -> str:
    from nanotf.region.proof import shaped_copies, traces, verdicts
    from nanotf.region.proof.states import UNKNOWN

    leaves = [
        traces.Argument(shape, tensor.dtype, True)
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
    reader = verdicts.read(traced, again)
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
    # These leave nothing behind. The operations of a call are looked at by themselves.
    if operation.type in ("Assert", "NoOp") or graphs.functions_of(operation):
        return False
    return graphs.has_effects(operation)


def _named(operation: Any) -> str:
    return f"{operation.type} ({operation.name})"
