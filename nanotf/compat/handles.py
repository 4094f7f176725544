"""Handles of variables (seen alike in 2.15 to 2.21).

| name | why |
| --- | --- |
| `BaseResourceVariable._handle` | what all operations on a variable get, eager ones written in C too |
| `resource_variable_ops.variable_accessed` | tells tapes that a variable is used |
| `record.VariableWatcher` | the variables that code uses |
| `FuncGraph.capture` | what stands for a handle in a graph |
| `auto_control_deps.register_acd_resource_resolver` | which handles name the same variable; else a read and a write through two of them have no order |
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import resource_variable_ops

from nanotf.compat import distribute

_SAME = "_nanotf_same_as"  # of a copy, the handle in the same graph that it is a copy of
_copies: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # by graph


def note_use(variables: Sequence[Any]) -> None:
    """Tells tapes that variables are used."""
    for variable in variables:
        if variable.trainable:
            resource_variable_ops.variable_accessed(variable)


def handle_of(variable: Any) -> Any:
    """A variable's handle."""
    return variable.handle


def set_handle(variable: Any, handle: Any) -> None:
    """Gives a variable another handle that names the same memory."""
    variable._handle = handle


@contextlib.contextmanager
def in_function() -> Iterator[None]:
    """In this context operations stand in the function whose loop or branch is being traced.

    TensorFlow can differentiate no loop that makes a handle in its body.
    """
    graph = distribute.function_graph()
    with contextlib.nullcontext() if graph is None else graph.as_default():
        yield


def name_same(handle: Any, other: Any) -> None:
    """Says that two handles name the same memory."""
    handle._handle_data = getattr(other, "_handle_data", None)
    if not tf.executing_eagerly():
        here = tf.compat.v1.get_default_graph().capture(other)
        setattr(handle, _SAME, getattr(here, _SAME, here))
        _copies.setdefault(handle.graph, []).append(handle)


@contextlib.contextmanager
def watching() -> Iterator[Callable[[], Sequence[Any]]]:
    """In this context the trainable variables that code uses are noted; yields a list of them."""
    with record.VariableWatcher() as watcher:
        yield watcher.watched_variables


def _resolve(op: Any, reads: Any, writes: Any) -> bool:
    """Makes operations on copies of a handle count as operations on the variable."""
    changed = False
    same = _same_in(op.graph)
    for found in (reads, writes):
        for tensor in [t for t in found if id(t) in same]:
            found.discard(tensor)
            found.add(same[id(tensor)])
            changed = True
    copies = op.type == "IdentityN" and any(hasattr(t, _SAME) for t in op.outputs)
    if copies and writes:
        reads.update(writes)
        writes.clear()
        changed = True
    return changed


# Of a graph: how many handles it had captured, and what each handle that is a copy stands for.
_known: weakref.WeakKeyDictionary[Any, tuple[int, dict[int, Any]]] = weakref.WeakKeyDictionary()


def _same_in(graph: Any) -> dict[int, Any]:
    captures = getattr(graph, "captures", ())
    number = len(captures) + len(_copies.get(graph, ()))
    if graph in _known and _known[graph][0] == number:
        return _known[graph][1]
    same = {id(copy): getattr(copy, _SAME) for copy in _copies.get(graph, ())}
    inside = {id(outer): inner for outer, inner in captures}
    for outer, inner in captures:
        original = getattr(outer, _SAME, None)
        if original is not None:
            same[id(inner)] = inside.get(id(original), original)
    _known[graph] = number, same
    return same


auto_control_deps.register_acd_resource_resolver(_resolve)
