"""What is alike in both generations of Keras, of which `keras2` and `keras3` are made, too.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Layer._flatten_layers` | 2 and 3 | all layers of a model, those inside of layers among them |
| `Trackable._self_unconditional_checkpoint_dependencies`, `_self_unconditional_dependency_names` | 2 and 3 | a model depends on the functions of its loops after they were made |
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from nanotf.compat.versions import keras_module_name, require_tensorflow

_DEPENDENCIES = ("checkpoint_dependencies", "dependency_names")


def source_module(path: str) -> Any:
    """A module below the Keras package's `src`."""
    return importlib.import_module(f"{keras_module_name()}.src.{path}")


def is_keras_own(value: Any) -> bool:
    """Whether a function or class is Keras's own."""
    module = getattr(value, "__module__", None) or ""
    return module.split(".")[0] in (keras_module_name(), "keras", "tf_keras")


def flat_layers(obj: Any) -> list[Any]:
    """A layer or model and all layers inside of it; another object alone."""
    return list(obj._flatten_layers()) if hasattr(obj, "_flatten_layers") else [obj]


def without_dependencies(attributes: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the attributes of a trackable object, without its dependencies of these names."""
    found = dict(attributes)
    references, by_name = (f"_self_unconditional_{kind}" for kind in _DEPENDENCIES)
    if references in found:
        found[references] = [r for r in found[references] if r.name not in names]
    if by_name in found:
        found[by_name] = {n: v for n, v in found[by_name].items() if n not in names}
    return found


def has_own_step(model: Any, name: str = "train_step") -> bool:
    """Whether the user wrote the model's `train_step`, or another step.

    With no loss in `compile`, it need not use Keras's container of losses. That would bring a
    metric of its own, "loss", to stand in the place of what such a step returns.
    """
    own = getattr(model, "_nanotf_own_steps", None)
    if own is not None:  # a replica, whose class has a train_step anyway
        return name in own
    return not is_keras_own(getattr(type(model), name))


def tf_variable(variable: Any) -> Any:
    """The `tf.Variable` behind a variable of either generation."""
    tf = require_tensorflow()
    return variable if isinstance(variable, tf.Variable) else variable.value


def holds_numbers(value: Any) -> bool:
    """Whether something is a `tf.Variable` of numbers, and of a known shape."""
    tf = require_tensorflow()
    is_variable = isinstance(value, tf.Variable) and value.shape.is_fully_defined()
    return is_variable and value.dtype not in (tf.string, tf.resource, tf.variant)
