"""Code shared by both generations of Keras; `keras2` and `keras3` build on it.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Layer._flatten_layers` | 2 and 3 | all layers of a model, including layers inside layers |
| `Trackable._self_unconditional_checkpoint_dependencies`, `_self_unconditional_dependency_names` | 2 and 3 | a model depends on the functions of its loops after they were made |
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nanotf.compat.versions import keras_module_name, require_tensorflow

_REFERENCES = "_self_unconditional_checkpoint_dependencies"
_REFERENCES_BY_NAME = "_self_unconditional_dependency_names"
# A model has these after the first call of a loop of Keras's.
OF_LOOPS = ("history", "stop_evaluating", "stop_predicting")


@functools.cache
def source_module(path: str) -> Any:
    """Imports a module below the Keras package's `src`."""
    return importlib.import_module(f"{keras_module_name()}.src.{path}")


def is_keras_own(value: Any) -> bool:
    """Returns True if a function or class is Keras's own."""
    module = getattr(value, "__module__", None) or ""
    return module.split(".")[0] in (keras_module_name(), "keras", "tf_keras")


def replacing_module(method: Any) -> str:
    """Returns the name of the module whose code replaced a method of Keras's; empty if none did.

    Libraries that log or trace by themselves set their own function on Keras's classes. It keeps
    the name and `__module__` of Keras's function, but not its globals.
    """
    function = getattr(method, "__func__", method)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    known = (keras_module_name(), "keras", "tf_keras", "tensorflow")
    return "" if module.partition(".")[0] in ("", *known) else module


def flat_layers(obj: Any) -> list[Any]:
    """Returns a layer or model with all layers inside it; any other object alone."""
    return list(obj._flatten_layers()) if hasattr(obj, "_flatten_layers") else [obj]


@contextlib.contextmanager
def around_layers(scope: Callable[[Any], AbstractContextManager[None]]) -> Iterator[None]:
    """Enters a context around each call of a layer, while this context lasts.

    Args:
        scope: takes a layer, returns a context manager.
    """
    kind = require_tensorflow().keras.layers.Layer
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(self):
            return original(self, *args, **kwargs)

    kind.__call__ = call  # on the class: Python looks up `__call__` there, not in the object
    try:
        yield
    finally:
        kind.__call__ = original


def leaving_behind(attributes: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns an object's attributes with None for these names, and no dependency on them."""
    found = attributes | {name: None for name in names if name in attributes}
    if _REFERENCES in found:
        found[_REFERENCES] = [r for r in found[_REFERENCES] if r.name not in names]
    if _REFERENCES_BY_NAME in found:
        by_name = found[_REFERENCES_BY_NAME]
        found[_REFERENCES_BY_NAME] = {n: v for n, v in by_name.items() if n not in names}
    return found


@contextlib.contextmanager
def attributes_set(obj: Any, gone: Sequence[str] = (), **new: Any) -> Iterator[None]:
    """Gives an object other attributes, in this context, past its `__setattr__`.

    Args:
        gone: names of those that it does not have there.
    """
    found = vars(obj)
    before = {name: found[name] for name in (*gone, *new) if name in found}
    for name in gone:
        found.pop(name, None)
    found.update(new)
    try:
        yield
    finally:
        for name in new:
            del found[name]
        found.update(before)


def has_own_step(model: Any, name: str = "train_step") -> bool:
    """Returns True if the user wrote the model's `train_step`, or another step.

    Without a loss in `compile`, such a step need not use Keras's loss container. The container
    would add its own metric, "loss", which would replace the value that the step returns.
    """
    own = getattr(model, "_nanotf_own_steps", None)
    if own is not None:  # a replica; its class always has a train_step
        return name in own
    return not is_keras_own(getattr(type(model), name))


def tf_variable(variable: Any) -> Any:
    """Returns the `tf.Variable` behind a variable of either generation."""
    tf = require_tensorflow()
    if isinstance(variable, tf.Variable):
        return variable
    # Inside a layer with mixed precision, Keras 3's `value` is a tensor of another type.
    held = getattr(variable, "_value", None)
    return variable.value if held is None else held


def tf_variables(layer: Any) -> list[Any]:
    """Returns the `tf.Variable`s among a layer's variables, where Keras 2 lists lookup tables."""
    return [tf_variable(v) for v in layer.variables if hasattr(v, "assign")]


def holds_numbers(value: Any) -> bool:
    """Returns True for a `tf.Variable` of numbers with a known shape."""
    tf = require_tensorflow()
    is_variable = isinstance(value, tf.Variable) and value.shape.is_fully_defined()
    # Values of these have no fixed number of bytes, or none that another process could use.
    return is_variable and value.dtype not in (tf.string, tf.resource, tf.variant)
