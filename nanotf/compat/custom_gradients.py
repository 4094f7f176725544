"""Frees the graphs of functions with custom gradients, which TensorFlow keeps forever.

`tf.custom_gradient`, in a graph, registers its gradient under a new name in a registry of the
process, and nothing removes it. The gradient refers to tensors, and so to its graph: every traced
training step stays in memory. With Keras 3 that is 5 MB of each `fit`, since its optimizer reduces
gradients through such a function (seen in TensorFlow 2.21; keras-team/keras#17458).

    registry --> gradient --> tensors --> graph           as TensorFlow has it
    registry - - gradient <--> graph                      here: they end together
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from nanotf.compat.replacements import Override

_names: set[str] = set()  # of custom gradients that are not registered yet


def _generate_name(stock: Callable[[], str], _: Any) -> Callable[[], str]:
    def generate_name() -> str:
        name = stock()
        _names.add(name)
        return name

    return generate_name


def _call(stock: Callable[[Any, Any], Any], _: Any) -> Callable[[Any, Any], Any]:
    def __call__(self: Any, f: Any) -> Any:
        if self._op_type not in _names:
            return stock(self, f)  # a gradient of the user's, for any graph
        _names.discard(self._op_type)
        _register(self._op_type, f)
        return f

    return __call__


def _register(name: str, gradient: Callable[..., Any]) -> None:
    from tensorflow.python.framework import ops

    graph, weak = ops.get_default_graph(), weakref.ref(gradient)

    def call(*arguments: Any) -> Any:
        found = weak()
        assert found is not None, "the graph whose operation is differentiated keeps it"
        return found(*arguments)

    ops.gradient_registry.register(call, name)
    graph._nanotf_gradients = [*getattr(graph, "_nanotf_gradients", ()), gradient]
    # Not at exit, when the whole registry ends.
    weakref.finalize(graph, ops.gradient_registry._registry.pop, name, None).atexit = False


TABLE = (
    Override(
        "tensorflow.python.ops.custom_gradient:generate_name",
        "tells a custom gradient from a gradient that a user registers by name",
        _generate_name,
    ),
    Override(
        "tensorflow.python.framework.ops:RegisterGradient.__call__",
        "the registry must not keep the graph",
        _call,
    ),
)
