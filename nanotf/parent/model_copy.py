"""A copy of the user's model in this process, made as workers make theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanotf.compat import keras_names, keras_optimizers
from nanotf.shipping import heap, objects

Side = tuple[Any, list[Any]]  # a model, and the variables that it captures


def copy_of(model: Any, recipe: bytes, captured: Sequence[int]) -> Side:
    """Makes a compiled copy of a model, whose variables still have values of their own.

    Args:
        model: the user's model, built.
        recipe: bytes, what `shipping.heap.dump` has made of the model.
        captured: sequence of int, the numbers there of the variables that it captures.
    """
    copy, numbered = heap.load(recipe)
    objects.build_optimizers([copy], objects.built_optimizers([model]))
    if keras_names.builds_optimizer_for_all(model):
        keras_optimizers.build_optimizer(copy)
    return copy, [numbered[number] for number in captured]


def copy_state(source: Side, target: Side) -> None:
    """Gives the variables of one side, the optimizers' included, the values of the other's."""
    values, variables = (
        keras_optimizers.training_variables(model) + more for model, more in (source, target)
    )
    for value, variable in zip(values, variables, strict=True):
        variable.assign(value.numpy())
