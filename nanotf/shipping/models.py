"""How layers and models are built in another process as they were built in one."""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_names
from nanotf.shipping import classes


def build_configs(layer: Any) -> tuple[dict[str, Any] | None, ...]:
    """The input shapes that a layer or model, and those below it, were built with."""
    return tuple(
        classes.plain(keras_names.build_config(each)) if each.built else None
        for each in classes.with_layers(layer)
    )


def build_layers(model: Any, configs: tuple[dict[str, Any] | None, ...]) -> None:
    """Builds a layer or model, and the layers below it, each as that of another was built.

    So it matters neither what calls them nor of which types the inputs are: a configuration has
    shapes alone.
    """
    layers = classes.with_layers(model)
    for place, config in enumerate(configs):
        if place < len(layers) and config and not layers[place].built:
            keras_names.build_alone(layers[place], config)
            layers = classes.with_layers(model)  # those that it has made come after it


def needs_call(model: Any) -> bool:
    """Whether a model has to be called before all its variables exist."""
    if keras_names.has_call(model):
        return not model.built or not model.variables
    # Keras 2 has no list of variables before.
    return not all(v.built for v in keras_names.layers_below(model)) or not model.variables
