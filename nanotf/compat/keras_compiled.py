"""What the containers of a model's compiled losses and metrics hold once they are built.

Keras builds them at the first step, by the shapes of targets and outputs, which nobody knows
afterwards. What they hold then is all plain: lists of metrics and losses, and names.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Model._compile_metrics`, its `_flat_metrics`, `_flat_weighted_metrics`, `_resolved_output_names`, `built`; `MetricsList` | 3; 3.10-3.15 | the metrics |
| `Model._compile_loss`, its `Loss`, `_flat_losses`, `_metrics`, `_tracker`, `_y_pred_build_structure`, `_y_true_build_structure`, `built` | 3; 3.10-3.15 | the losses, and a metric for each of several |
| `Model.compiled_metrics`, its `_metrics`, `_weighted_metrics`, `_metrics_in_order`, `_output_names`, `_built` | 2; 2.15, tf_keras 2.15-2.21 | the metrics |
| `Model.compiled_loss`, its `_losses`, `_loss_weights`, `_per_output_metrics`, `_output_names`, `_built` | 2; 2.15, tf_keras 2.15-2.21 | the losses, and a metric for each of several |
"""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import is_keras_3, require_tensorflow

_OF_METRICS_3 = ("_flat_metrics", "_flat_weighted_metrics", "_resolved_output_names")
_OF_LOSSES_3 = ("_y_pred_build_structure", "_y_true_build_structure")
_OF_METRICS_2 = ("_metrics", "_weighted_metrics", "_metrics_in_order", "_output_names")
_OF_LOSSES_2 = ("_losses", "_loss_weights", "_per_output_metrics", "_output_names")

Built = dict[str, dict[str, Any]]  # by container, "losses" and "metrics", then by attribute


def _containers(model: Any) -> dict[str, Any]:
    if not keras_names.is_compiled(model):
        return {}
    if is_keras_3():
        found = {"losses": model._compile_loss, "metrics": model._compile_metrics}
    else:
        found = {"losses": model.compiled_loss, "metrics": model.compiled_metrics}
    return {kind: container for kind, container in found.items() if container is not None}


def given_metrics(model: Any) -> list[Any]:
    """The metric objects that a model's `compile` was called with, in a fixed order."""
    if not keras_names.is_compiled(model):
        return []
    arguments = keras_names.compile_arguments(model)
    given = [arguments.get("metrics"), arguments.get("weighted_metrics")]
    tf = require_tensorflow()
    return [m for m in tf.nest.flatten(given) if isinstance(m, tf.keras.metrics.Metric)]


def built_state(model: Any) -> Built:
    """What the built containers of a model hold, for `set_built_state`; {} if none is built."""
    return {
        kind: _state_3(kind, container) if is_keras_3() else _state_2(kind, container)
        for kind, container in _containers(model).items()
        if container.built
    }


def set_built_state(model: Any, state: Built) -> None:
    """Makes the containers of a compiled model built as `built_state` says, but those that are."""
    containers = _containers(model)
    for kind, attributes in state.items():
        container = containers[kind]
        if not container.built:
            (_set_3 if is_keras_3() else _set_2)(kind, container, attributes)


def _state_3(kind: str, container: Any) -> dict[str, Any]:
    if kind == "losses":
        found = {name: getattr(container, name) for name in _OF_LOSSES_3}
        losses = [tuple(loss) for loss in container._flat_losses]
        return {**found, "losses": losses, "metrics": list(container._metrics)}

    def plain(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [(list(v.metrics), v.output_name) if hasattr(v, "metrics") else v for v in value]

    return {name: plain(getattr(container, name)) for name in _OF_METRICS_3}


def _set_3(kind: str, container: Any, state: dict[str, Any]) -> None:
    if kind == "losses":
        for name in _OF_LOSSES_3:
            setattr(container, name, state[name])
        container._flat_losses = [container.Loss(*loss) for loss in state["losses"]]
        for metric in state["metrics"]:
            container._tracker.add_to_store("metrics", metric)
    else:
        metrics_list = keras_names.source_module("trainers.compile_utils").MetricsList

        def made(value: Any) -> Any:
            if not isinstance(value, tuple):
                return value
            return metrics_list(value[0], output_name=value[1])

        for name, value in state.items():
            setattr(container, name, [made(v) for v in value] if value is not None else None)
    container.built = True


def _state_2(kind: str, container: Any) -> dict[str, Any]:
    names = _OF_LOSSES_2 if kind == "losses" else _OF_METRICS_2
    return {name: getattr(container, name) for name in names}


def _set_2(kind: str, container: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(container, name, value)
    container._built = True
