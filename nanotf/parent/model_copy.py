"""A copy of the user's model in this process, made as workers make theirs."""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_optimizers
from nanotf.shipping import captured, models

Side = tuple[Any, list[Any]]  # a model, and the variables that it captures


def copy_of(recipe: bytes) -> Side:
    """Makes a compiled copy of a model, whose variables still have values of their own.

    Args:
        recipe: bytes, what `shipping.captured.dump` has made of the model.
    """
    loaded = captured.Loaded(recipe)
    copy = models.build(loaded.recipe)
    loaded.compile(copy)
    models.exclude_from_decay(copy, loaded.recipe)
    keras_optimizers.build_optimizer(copy)
    return copy, loaded.captured(copy).variables


def copy_state(source: Side, target: Side) -> None:
    """Gives the variables of one side, the optimizers' included, the values of the other's."""
    values, variables = (
        keras_optimizers.training_variables(model) + more for model, more in (source, target)
    )
    for value, variable in zip(values, variables, strict=True):
        variable.assign(value.numpy())
