"""The graph of a function: traced, read, cut into parts (identical in TensorFlow 2.14 to 2.21).

| name | why |
| --- | --- |
| `func_graph.FuncGraph`, its `captures` | a graph of a call that never runs; `tf.function` would keep it |
| `execute.execute` | runs an operation of a graph on values |
| `Graph._get_function` | the graphs of loops, branches and calls |
| `function_def_to_graph` | the graphs of loops that TensorFlow still makes with `Defun` (`ctc_loss`) |
| `auto_control_deps.op_is_stateful`, `auto_control_deps_utils.RESOURCE_READ_OPS`, `get_read_write_resource_inputs` | operations with effects, and the variables that they write |
| `Operation.traceback`, `Operation._original_op`, AutoGraph's `__autograph_generated_file*.py` | the line of code that made an operation; for one of a gradient, the operation that it belongs to; AutoGraph does not map the lines of a gradient's function back |
| `tensor_util.constant_value` | the value of a constant |
| `auto_control_deps.AutomaticControlDependencies`, its `ops_which_must_run` | orders the side effects of a traced call and names them; `tf.compat.v1.wrap_function`, which makes prunable functions, does not |
| `Operation._remove_all_control_inputs`, `_add_control_inputs` | edges of that order lead from one part to another, where they would pull the other part in; the order of an optimizer's updates |
| `Operation._gradient_function` | the gradient of a call of a `tf.function`; `prune` of `tf.compat.v1.wrap_function` copies operations without it |
| `ops.get_gradient_function` | operations without gradients, such as `stop_gradient` |
| `BaseResourceVariable._read_variable_op` | all that reads a variable calls it |
| `ops.get_stats_for_node_def`, `profiler.internal.flops_registry`, `deprecation.silence` | the work of an operation; the public profiler prints what it does not know |
| `autograph.impl.api.convert`, `core.ag_ctx.ControlStatusCtx` | AutoGraph with the leniency of `tf.function`; the public `to_graph` fails without source code |
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError

# TensorFlow orders them like writes.
_TABLE_READS = ("LookupTableExportV2", "LookupTableFindV2", "LookupTableSizeV2")
RUN_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")  # types of operations


def nodes_of(definition: Any) -> Iterator[Any]:
    """Yields the nodes of a `tf.compat.v1.GraphDef`, and those of its functions."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def drawing(definition: Any) -> Iterator[Any]:
    """Yields a graph's operations that draw random numbers from a state of their own.

    Those of `tf.random.uniform`, and of dropout in Keras 2, are such; they have the attributes
    `seed` and `seed2`. Nobody can read the state: it is in TensorFlow's kernel. It begins anew in
    another graph, and in another process.
    """
    for node in nodes_of(definition):
        if draws(node):
            yield node


def draws(node: Any) -> bool:
    """Returns True for an operation that draws from a state of its own, see `drawing`."""
    return {"seed", "seed2"} <= set(node.attr)


class SideEffects:
    """Operations of a traced call that must run although no result depends on them."""

    def __init__(self) -> None:
        self.operations: set[Any] = set()

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Puts the side effects of operations made in this context in order, and collects them."""
        from tensorflow.python.framework import auto_control_deps

        with auto_control_deps.AutomaticControlDependencies() as order:
            yield
        self.operations |= order.ops_which_must_run


def keep_control_inputs(operation: Any, kept: Sequence[Any]) -> None:
    """Removes an operation's control inputs except `kept`."""
    if len(kept) < len(operation.control_inputs):
        operation._remove_all_control_inputs()
        operation._add_control_inputs(list(kept))


def run_in_order(operations: Sequence[Any]) -> None:
    """Makes each of a graph's operations wait for the one before it.

    Args:
        operations: in the order in which they were made, so that none waits for a later one.
    """
    for before, operation in itertools.pairwise(operations):
        if before not in operation.control_inputs:
            operation._add_control_inputs([before])


def take_gradients(copies: Any, graph: Any) -> None:
    """Gives copies of a graph's operations the functions that compute the originals' gradients.

    Calls of `tf.function`s have such: a layer's loop in Keras 2, or the user's code. TensorFlow
    would differentiate a copy by `SymbolicGradient`, which knows no loops.

    Args:
        copies: a graph in which operations have the names of their originals.
    """
    originals = {operation.name: operation for operation in graph.get_operations()}
    for copy in copies.get_operations():
        original = originals.get(copy.name)
        if original is not None and original.type == copy.type:
            copy._gradient_function = original._gradient_function


def float_operations(graph: Any) -> dict[str, int]:
    """Returns the floating-point operations of a graph's operations, by name, where known.

    They are not known of operations with inputs of unknown shape, nor of those without a rule in
    TensorFlow's profiler.
    """
    from tensorflow.python.framework import ops
    from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  has the rules
    from tensorflow.python.util import deprecation

    found = {}
    with deprecation.silence():
        for operation in graph.get_operations():
            try:
                known = ops.get_stats_for_node_def(graph, operation.node_def, "flops").value
            except ValueError:  # unknown shapes
                continue
            if known is not None:
                found[operation.name] = int(known)
    return found


def all_float_operations(graph: Any, given: Callable[[Any], Any] = lambda _: None) -> int:
    """Returns the floating-point operations of a graph and its functions, as far as known.

    A loop counts as often as it says that it runs at most, a branch as if all of them ran.

    Args:
        given: returns the constant value of an input of the graph, None if it has none.
    """

    def value_of(tensor: Any) -> Any:
        if tensor.op.type == "Placeholder":
            return given(tensor)
        # In elements: enough for a shape, on which a loop's bound may depend.
        return constant(tensor, value_of, 16)

    total = sum(float_operations(graph).values())
    for operation in graph.get_operations():
        for inner in functions_of(operation):
            total += _most_runs(operation, value_of) * all_float_operations(
                inner, functools.partial(_argument, operation, inner, value_of)
            )
    return total


def _argument(operation: Any, inner: Any, value_of: Callable[[Any], Any], tensor: Any) -> Any:
    """Returns the constant value of a function's input, None if it has none, as in a loop."""
    if not operation.type.endswith("PartitionedCall"):
        return None
    places = [place for place, each in enumerate(inner.inputs) if each is tensor]
    return value_of(operation.inputs[places[0]]) if places else None


def _most_runs(operation: Any, value_of: Callable[[Any], Any]) -> int:
    """Returns the number of times that a loop of `tf.while_loop` runs at most, 1 if unknown."""
    if operation.type not in ("While", "StatelessWhile"):
        return 1
    known = value_of(operation.inputs[1])  # its maximum_iterations
    return max(int(known), 1) if known is not None and known.ndim == 0 else 1


def release(variable: Any, why: str) -> None:
    """Frees a variable's memory. Reading it raises until `refill`.

    Args:
        why: the text of the `ModelError`.
    """
    # Destroying the resource has no effect in eager execution, where it is a counted reference.
    refill(variable, require_tensorflow().zeros([0], variable.dtype))
    kind: Any = type(variable)
    variable.__class__ = _unreadable(kind)
    variable._nanotf_why = why


def refill(variable: Any, value: Any) -> None:
    """Assigns a value to a variable that `release` has freed, or that never had one."""
    if hasattr(variable, "_nanotf_why"):
        variable.__class__ = type(variable).__mro__[1]
        del variable._nanotf_why
    # `assign` compares the shape of the value with that of the one before.
    require_tensorflow().raw_ops.AssignVariableOp(
        resource=variable.handle, value=value, validate_shape=False
    )


_reads_released: contextvars.ContextVar[bool]
_reads_released = contextvars.ContextVar("nanotf_reads_released", default=False)


@contextlib.contextmanager
def reading_released() -> Iterator[None]:
    """Lets code in this context read released variables, in graphs that another process runs."""
    before = _reads_released.set(True)
    try:
        yield
    finally:
        _reads_released.reset(before)


@functools.cache
def _unreadable(kind: Any) -> Any:
    """Returns a class of variables that raise when they are read.

    TensorFlow would give an array of no elements.
    """

    class ReleasedVariable(kind):  # type: ignore[misc]
        def _check(self) -> None:
            if not _reads_released.get():
                raise ModelError(self._nanotf_why)

        def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
            self._check()
            return super()._read_variable_op(*args, **kwargs)

        # It and `gather_nd` read rows by operations of their own.
        def sparse_read(self, *args: Any, **kwargs: Any) -> Any:
            self._check()
            return super().sparse_read(*args, **kwargs)

        def gather_nd(self, *args: Any, **kwargs: Any) -> Any:
            self._check()
            return super().gather_nd(*args, **kwargs)

    return ReleasedVariable


def converted(function: Callable[..., Any], features: Any = None) -> Callable[..., Any]:
    """Returns a function that AutoGraph converts when it is called, as `tf.function` does.

    Args:
        features: `tf.autograph.experimental.Feature`s, default none.
    """
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.autograph.impl import api

    # Also in a context that is not converted, such as a `tf.function(autograph=False)`.
    enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
    wrapped: Callable[..., Any] = api.convert(
        recursive=True, optional_features=features, user_requested=True, conversion_ctx=enabled
    )(function)
    return wrapped


def new_graph(name: str) -> Any:
    """Makes a graph that takes tensors of the code around it as inputs, like a `tf.function`'s."""
    from tensorflow.python.framework import func_graph

    return func_graph.FuncGraph(name)


def elsewhere(dtype: Any, shape: Any) -> Any:
    """Returns a tensor of a graph that nothing runs, in place of another process's tensor."""
    tf = require_tensorflow()
    with new_graph("elsewhere").as_default():
        return tf.compat.v1.placeholder(dtype, shape)


def captured(graph: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of a tensor from outside a graph of `new_graph` and its placeholder inside."""
    return list(graph.captures)


# The attributes of operations by which calls, While, If and Case name what they run.
_FUNCTIONS = ("f", "cond", "body", "then_branch", "else_branch", "branches")


def functions_of(operation: Any) -> list[Any]:
    """Returns the graphs that a call, loop or branch runs, in a fixed order."""
    defined = {attribute.name for attribute in operation.op_def.attr}
    found: list[Any] = []
    for name in _FUNCTIONS:
        if name in defined:
            values = operation.get_attr(name)
            for value in values if isinstance(values, list) else [values]:
                if getattr(value, "name", None):
                    found.append(_function_graph(operation.graph, value.name))
    return found


def _function_graph(graph: Any, name: str) -> Any:
    holder = graph
    while holder is not None:
        function = holder._get_function(name)
        inner = getattr(function, "graph", None)
        if inner is not None:
            return inner
        if function is not None:
            return _defined_graph(graph, function)
        holder = getattr(holder, "outer_graph", None)
    raise LookupError(name)


def _defined_graph(graph: Any, function: Any) -> Any:
    """Returns the graph of a function of TensorFlow's Defun, which keeps only its definition."""
    from tensorflow.python.framework import function_def_to_graph

    # Kept on the function, and not in a table: the graph keeps its function alive.
    if not hasattr(function, "_nanotf_graph"):
        with graph.as_default():
            inner = function_def_to_graph.function_def_to_graph(function.definition)
        function._nanotf_graph = inner
    return function._nanotf_graph


def all_operations(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph, each followed by those of its functions."""
    for operation in graph.get_operations():
        yield operation
        for inner in functions_of(operation):
            yield from all_operations(inner)


def runs_python(graph: Any) -> bool:
    """Returns True if an operation of a graph or of its functions runs Python code."""
    return any(operation.type in RUN_PYTHON for operation in all_operations(graph))


def has_effects(operation: Any) -> bool:
    """Returns True if an operation does more than compute its results, or draw random numbers."""
    from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils

    if operation.type in (*auto_control_deps_utils.RESOURCE_READ_OPS, *_TABLE_READS):
        return False
    return bool(auto_control_deps.op_is_stateful(operation))


def written_resources(graph: Any) -> set[int]:
    """Returns the ids of the handles, outside all graphs, of the variables that a graph writes."""
    from tensorflow.python.framework import auto_control_deps_utils

    written = [
        tensor
        for operation in graph.get_operations()
        for tensor in auto_control_deps_utils.get_read_write_resource_inputs(operation)[1]
    ]
    while graph is not None:  # level by level, from placeholders to what they stand for outside
        outside = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        written = [outside.get(id(tensor), tensor) for tensor in written]
        graph = getattr(graph, "outer_graph", None)
    return {id(tensor) for tensor in written}


def has_gradient(operation: Any) -> bool:
    """Returns False for an operation, such as `tf.stop_gradient`, whose inputs get no gradients."""
    from tensorflow.python.framework import ops

    try:
        return ops.get_gradient_function(operation) is not None
    except LookupError:  # TensorFlow raises it, too, if it comes there
        return True


def has_own_gradient(operation: Any) -> bool:
    """Returns True if Python code defines the operation's gradient, as with `custom_gradient`."""
    try:
        return bool(operation.get_attr("_gradient_op_type"))
    except ValueError:
        return False


def line_of(operation: Any) -> tuple[str, int] | None:
    """Returns file and line of the innermost code of the user's that made an operation, if any.

    For an operation of a gradient it may be the line of the operation that has the gradient.
    """
    while operation is not None:
        for frame in reversed(operation.traceback or ()):
            if _is_users(frame.filename):
                return frame.filename, int(frame.lineno)
        operation = operation._original_op
    return None


def line_that_raised(error: BaseException) -> tuple[str, int] | None:
    """Returns file and line of the innermost code of the user's that raised an exception, if any."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return frame.filename, int(frame.lineno or 0)
    return None


def _is_users(file: str) -> bool:
    generated = os.path.basename(file).startswith("__autograph_generated_file")  # noqa: PTH119
    return not generated and not file.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Returns the folders of TensorFlow, Keras, nanotf and Python's own modules."""
    # "contextlib" stands for Python's modules, which lie in one folder; "<" for code without file.
    names = ("tensorflow", "keras", "tf_keras", "nanotf", "contextlib")
    found = [importlib.util.find_spec(name) for name in names]
    files = [spec.origin for spec in found if spec is not None and spec.origin]
    return (*(os.path.dirname(file) + os.sep for file in files), "<")  # noqa: PTH120


def constant(tensor: Any, value_of: Callable[[Any], Any], limit: int) -> Any:
    """Returns a constant tensor's value as an array, None if it is not constant.

    Args:
        tensor: a tensor of a graph.
        value_of: does the same for the inputs of its operation.
        limit: the number of elements above which only the value of a `Const` is returned.
    """
    from tensorflow.python.framework import tensor_util

    tf, operation = require_tensorflow(), tensor.op
    if operation.type == "Const":
        return tensor_util.constant_value(tensor)
    if operation.type in ("Shape", "ShapeN", "Size", "Rank"):
        shape = operation.inputs[tensor.value_index].shape
        if operation.type == "Rank":
            return None if shape.rank is None else tf.make_ndarray(tf.make_tensor_proto(shape.rank))
        if not shape.is_fully_defined():
            return None
        value = shape.num_elements() if operation.type == "Size" else shape.as_list()
        return tf.make_ndarray(tf.make_tensor_proto(value, tensor.dtype))
    if not operation.inputs or has_effects(operation) or functions_of(operation):
        return None
    if operation.type == "PlaceholderWithDefault":  # what runs the graph may give another value
        return None
    size = tensor.shape.num_elements()
    if (size is not None and size > limit) or tensor.dtype in (tf.variant, tf.resource, tf.string):
        return None
    inputs = [value_of(each) for each in operation.inputs]
    if any(value is None for value in inputs):
        return None
    try:
        result = _run(operation, inputs)[tensor.value_index]
    except tf.errors.OpError:  # it raises in the call, too, unless that runs another branch
        return None
    return result if result.size <= limit else None


def _run(operation: Any, inputs: list[Any]) -> list[Any]:
    """Runs an operation on other inputs, at once."""
    from tensorflow.python.eager import context, execute

    tf = require_tensorflow()
    given = list(zip(inputs, operation.inputs, strict=True))
    with tf.init_scope():
        tensors = [tf.constant(value, tensor.dtype) for value, tensor in given]
        attributes: list[Any] = []
        for attribute in operation.op_def.attr:
            value = operation.get_attr(attribute.name)
            attributes += [attribute.name, _as_number(value)]
        count = len(operation.outputs)
        found = execute.execute(
            operation.type, count, tensors, tuple(attributes), context.context()
        )
        return [tensor.numpy() for tensor in found]


def _as_number(value: Any) -> Any:
    """Returns types as the numbers that TensorFlow gives them; other values unchanged."""
    if isinstance(value, list):
        return [_as_number(each) for each in value]
    return getattr(value, "as_datatype_enum", value)
