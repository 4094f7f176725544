"""A copy of the user's model in this process, made the way workers make theirs."""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_names, keras_optimizers
from nanotf.shipping import heap, optimizers

Side = tuple[Any, list[Any]]  # a model, and the variables that it captures


def copy_of(call: Any) -> Side:
    """Makes a compiled copy of a model. Its variables do not have the model's values yet.

    Args:
        call: `model_call.ModelCall`.
    """
    copy, numbered = heap.load_model(call.heap)
    optimizers.build_optimizers(numbered, optimizers.built_optimizers(call.numbered))
    if keras_names.builds_optimizer_for_all(call.model):
        keras_optimizers.build_optimizer(copy)
    return copy, [numbered[number] for number in call.captured]


def copy_state(source: Side, target: Side) -> None:
    """Copies the values of all variables, the optimizers' included, to another side."""
    values, variables = (
        keras_optimizers.training_variables(model) + more for model, more in (source, target)
    )
    for value, variable in zip(values, variables, strict=True):
        variable.assign(value.numpy())
