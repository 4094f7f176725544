"""Exchanges that a graph makes only if it reads their results.

Their ops are stateless, so TensorFlow drops every exchange whose result is not read. It would run
the rest in any order, and threads that wait for different exchanges would deadlock. So these run
among the stateful ops of a `tf.function`, in the order of tracing.

TensorFlow would also compute stateless ops with constant inputs before it runs the function. The
length of a tensor is such an input. Workers do that in different orders, and wait for each other
forever. So each exchange has another input, `moment`, that is never constant. It is stateful, so
branches and functions that contain exchanges are stateful, too, and keep their places.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# By traced graph: the names of ops whose exchange is made only if it is read.
_noted: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
# By traced graph: the name of the input that keeps exchanges from being computed in advance.
_moments: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_read: dict[Any, set[str]] = {}  # by id of each graph being completed: the exchanges that are read


def guard(if_read: bool) -> dict[str, Any]:
    """Returns the further argument `moment` of an exchange that is made only if it is read."""
    return {"moment": _moment()} if if_read else {}


def _moment() -> Any:
    """Returns an int64 scalar, one per graph."""
    if tf.executing_eagerly():
        return tf.constant(0, tf.int64)
    graph = tf.compat.v1.get_default_graph()
    if graph not in _moments:
        # Later exchanges take it, too, and must not wait for what the first one waits for.
        with tf.control_dependencies(None):
            # An integer: a region would trace gradients of a float that it takes from outside.
            # `Print` is stateful, returns its input, and prints it `first_n` times.
            zero = tf.constant(0, tf.int64)
            _moments[graph] = tf.raw_ops.Print(input=zero, data=[], first_n=0).name
    return graph.get_tensor_by_name(_moments[graph])


def noted(result: Any, if_read: bool) -> Any:
    """Registers an exchange; returns its result."""
    if if_read and not tf.executing_eagerly():
        _noted.setdefault(result.graph, set()).add(result.op.name)
    return result


def completing(stock: Any, _: Any) -> Any:
    """Makes the end of a function's trace find the exchanges that it reads; see `overrides`."""

    @functools.wraps(stock)
    def __exit__(self: Any, *args: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if graph not in _noted:
            return stock(self, *args)
        with _reading(graph, self._returned_tensors):
            return stock(self, *args)

    return __exit__


def ordering(stock: Any, _: Any) -> Any:
    """Makes an exchange that is read count as stateful, so that it runs, and in its place."""

    @functools.wraps(stock)
    def op_is_stateful(op: Any) -> bool:
        found = _read.get(id(op.graph))
        return bool(stock(op)) if found is None else bool(stock(op)) or op.name in found

    return op_is_stateful


@contextlib.contextmanager
def _reading(graph: Any, returned: Any) -> Iterator[None]:
    _read[id(graph)] = _reached(graph, returned) & _noted[graph]
    try:
        yield
    finally:
        del _read[id(graph)]


def _reached(graph: Any, returned: Any) -> set[str]:
    """Returns the names of ops that a graph's results and stateful ops depend on."""
    waiting = [op for op in graph.get_operations() if op._is_stateful]
    waiting += [tensor.op for tensor in tf.nest.flatten(list(returned), expand_composites=True)]
    found: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return found
