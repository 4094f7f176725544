"""Finds the operations of a graph that draw random numbers from a state of their own.

Those of `tf.random.uniform`, and of dropout in Keras 2, are such. Nobody can read the state: it is
in TensorFlow's kernel. It begins anew in another graph, and in another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanotf.compat.graphs import nodes_of


def with_state(definition: Any) -> Iterator[Any]:
    """Yields a graph's operations with the attributes `seed` and `seed2`, which have such a state.

    Args:
        definition: `tf.compat.v1.GraphDef`.
    """
    for node in nodes_of(definition):
        if {"seed", "seed2"} <= set(node.attr):
            yield node


def without_seed(definition: Any) -> Iterator[Any]:
    """Yields those of them that begin with another state each time."""
    for node in with_state(definition):
        if not node.attr["seed"].i and not node.attr["seed2"].i:
            yield node
