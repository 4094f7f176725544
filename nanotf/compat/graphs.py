"""The graph of a function, cut into parts (identical in TensorFlow 2.14 to 2.21).

| name | why |
| --- | --- |
| `auto_control_deps.AutomaticControlDependencies`, its `ops_which_must_run` | orders the side effects of a traced call and names them; `tf.compat.v1.wrap_function`, which makes prunable functions, does not |
| `Operation._remove_all_control_inputs`, `_add_control_inputs` | edges of that order lead from one part to another, where they would pull the other part in |
| `resource_variable_ops.UninitializedVariable` | a variable without memory |
| `ops.get_stats_for_node_def`, `profiler.internal.flops_registry`, `deprecation.silence` | the work of an operation; the public profiler prints what it does not know |
| `autograph.impl.api.convert` | AutoGraph with the leniency of `tf.function`; the public `to_graph` fails without source code |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nanotf.compat.versions import require_tensorflow


def nodes_of(definition: Any) -> Iterator[Any]:
    """Yields the nodes of a `tf.compat.v1.GraphDef`, and those of its functions."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


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


def uninitialized_variable(spec: Any, arguments: dict[str, Any]) -> Any:
    """Makes a `tf.Variable` that has no value, and so no memory, until one is assigned.

    Args:
        spec: `tf.TensorSpec`, its shape and dtype.
        arguments: dict, keyword arguments that a variable creator gets.
    """
    from tensorflow.python.ops import resource_variable_ops

    names = ("trainable", "name", "synchronization", "aggregation", "constraint")
    kept = {name: arguments[name] for name in names if arguments.get(name) is not None}
    return resource_variable_ops.UninitializedVariable(shape=spec.shape, dtype=spec.dtype, **kept)


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


def release(variable: Any) -> None:
    """Frees a variable's memory. Reading it then gives an array of no elements; see `refill`."""
    # Destroying the resource has no effect in eager execution, where it is a counted reference.
    refill(variable, require_tensorflow().zeros([0], variable.dtype))


def refill(variable: Any, value: Any) -> None:
    """Assigns a value to a variable that `release` has freed, or that never had one."""
    # `assign` compares the shape of the value with that of the one before.
    require_tensorflow().raw_ops.AssignVariableOp(
        resource=variable.handle, value=value, validate_shape=False
    )


def converted(function: Callable[..., Any], features: Any = None) -> Callable[..., Any]:
    """Returns a function that AutoGraph converts when it is called, as `tf.function` does.

    Args:
        function: callable.
        features: `tf.autograph.experimental.Feature`s, default none.
    """
    from tensorflow.python.autograph.impl import api

    wrapped: Callable[..., Any] = api.convert(
        recursive=True, optional_features=features, user_requested=True
    )(function)
    return wrapped
