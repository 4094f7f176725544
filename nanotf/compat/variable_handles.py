"""Handles of variables (identical in 2.14 to 2.21).

| name | why |
| --- | --- |
| `BaseResourceVariable._handle` | the input of every operation on a variable, including eager operations in C |
| `resource_variable_ops.variable_accessed` | tells tapes that a variable is used |
| `record.VariableWatcher` | the variables that code reads; a `tf.GradientTape`, which tells them, keeps all operations, too |
| `FuncGraph.capture` | a handle's placeholder in a graph |
| `auto_control_deps.register_acd_resource_resolver` | declares that two handles name the same variable; otherwise a read through one and a write through the other are unordered |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import resource_variable_ops

from nanotf.compat import distribute

_SAME = "_nanotf_same_as"  # attribute of a copy: the original handle in the same graph
# Attributes of a graph, and no dictionary by graph: handles refer to their graph, and would keep it.
_COPIES = "_nanotf_copies"  # list of the copies made in it
_KNOWN = "_nanotf_known"  # the number of handles it had captured, and the original of each copy


def note_use(variables: Sequence[Any]) -> None:
    """Tells the tapes that variables are used."""
    for variable in variables:
        if variable.trainable:
            resource_variable_ops.variable_accessed(variable)


def handle_of(variable: Any) -> Any:
    """Returns a variable's handle."""
    return variable.handle


def set_handle(variable: Any, handle: Any) -> None:
    """Gives a variable another handle that names the same memory."""
    variable._handle = handle


@contextlib.contextmanager
def in_function() -> Iterator[None]:
    """Adds operations to the function that contains the loop or branch being traced.

    TensorFlow cannot differentiate a loop that makes a handle in its body.
    """
    graph = distribute.function_graph()
    with contextlib.nullcontext() if graph is None else graph.as_default():
        yield


def name_same(handle: Any, other: Any) -> None:
    """Declares that two handles name the same memory."""
    handle._handle_data = getattr(other, "_handle_data", None)
    if not tf.executing_eagerly():
        here = tf.compat.v1.get_default_graph().capture(other)
        setattr(handle, _SAME, getattr(here, _SAME, here))
        graph = handle.graph
        setattr(graph, _COPIES, [*getattr(graph, _COPIES, ()), handle])


class VariableReads:
    """Context manager that notes the trainable variables which this thread's code reads.

    Functions that it calls read theirs, too.

    Attributes:
        variables: list of `tf.Variable`s, known at the end of the context.
    """

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self._watcher: Any = None

    def __enter__(self) -> VariableReads:
        self._watcher = record.VariableWatcher()
        self._watcher.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._watcher.__exit__(*error)
        self.variables += self._watcher.watched_variables()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what code in this context reads."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def _resolve(op: Any, reads: Any, writes: Any) -> bool:
    """Treats operations on copies of a handle as operations on the original."""
    changed = False
    same = _same_in(op.graph)
    for found in (reads, writes):
        for tensor in [t for t in found if id(t) in same]:
            found.discard(tensor)
            found.add(same[id(tensor)])
            changed = True
    # A region's `spread` passes handles through such an operation, which looks like a write.
    copies = op.type == "IdentityN" and any(hasattr(t, _SAME) for t in op.outputs)
    if copies and writes:
        reads.update(writes)
        writes.clear()
        changed = True
    return changed


def _same_in(graph: Any) -> dict[int, Any]:
    captures, copies = getattr(graph, "captures", ()), getattr(graph, _COPIES, ())
    number = len(captures) + len(copies)
    known: tuple[int, dict[int, Any]] = getattr(graph, _KNOWN, (-1, {}))
    if known[0] == number:  # nothing new; TensorFlow asks for every operation
        return known[1]
    same = {id(copy): getattr(copy, _SAME) for copy in copies}
    inside = {id(outer): inner for outer, inner in captures}
    for outer, inner in captures:
        original = getattr(outer, _SAME, None)
        if original is not None:
            same[id(inner)] = inside.get(id(original), original)
    setattr(graph, _KNOWN, (number, same))
    return same


auto_control_deps.register_acd_resource_resolver(_resolve)
