"""What the containers of a model's compiled losses and metrics hold once they are built.

Keras builds them at the first step, by the shapes of targets and outputs, which nobody knows
afterwards. What they hold then is all plain: lists of metrics and losses, and names.
"""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow

Built = dict[str, dict[str, Any]]  # by container, "losses" and "metrics", then by attribute


def _containers(model: Any) -> dict[str, Any]:
    if not generation().is_compiled(model):
        return {}
    found = generation().compiled_containers(model)
    return {kind: container for kind, container in found.items() if container is not None}


def given_metrics(model: Any) -> list[Any]:
    """The metric objects that a model's `compile` was called with, in a fixed order."""
    if not generation().is_compiled(model):
        return []
    arguments = keras_names.compile_arguments(model)
    given = [arguments.get("metrics"), arguments.get("weighted_metrics")]
    tf = require_tensorflow()
    return [m for m in tf.nest.flatten(given) if isinstance(m, tf.keras.metrics.Metric)]


def built_state(model: Any) -> Built:
    """What the built containers of a model hold, for `set_built_state`; {} if none is built."""
    return {
        kind: generation().container_state(kind, container)
        for kind, container in _containers(model).items()
        if container.built
    }


def set_built_state(model: Any, state: Built) -> None:
    """Makes the containers of a compiled model built as `built_state` says, but those that are."""
    containers = _containers(model)
    for kind, attributes in state.items():
        container = containers[kind]
        if not container.built:
            generation().set_container_state(kind, container, attributes)
