"""How layers and models are built in another process as they were built in one."""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
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


def check_rows_are_independent(model: Any) -> None:
    """Refuses layers that go on, in the next batch, from where each row of the last one stood.

    Raises:
        ModelError: A recurrent layer is stateful; names it and the remedy.
    """
    recurrent = require_tensorflow().keras.layers.RNN
    for layer in keras_names.flat_layers(model):
        if isinstance(layer, recurrent) and layer.stateful:
            raise ModelError(
                "A recurrent layer with stateful=True keeps a state for every row of a batch, and "
                f"workers share the rows. Received: layer {layer.name!r} with stateful=True. Leave "
                "num_processes out, or make the layer with stateful=False."
            )
