"""Copies of the user's model and data in this process, made the way workers make theirs."""

from __future__ import annotations

from typing import Any

from nanotf.compat import keras_compiling, keras_optimizers
from nanotf.errors import ShippingError
from nanotf.shipping.objects import heap

Side = tuple[Any, list[Any]]  # a model, and the variables that it captures


def copy_of(call: Any) -> Side:
    """Makes a compiled copy of a model. Its variables do not have the model's values yet.

    Args:
        call: `model_call.ModelCall` of the user's model, which is built.
    """
    # Not checked: under a strategy's scope, variables are the strategy's.
    copy, numbered = heap.load_model(call.traced.heap, is_checked=False)
    if keras_compiling.builds_optimizer_for_all(call.model):
        keras_optimizers.build_optimizer(copy)
    return copy, [numbered[number] for number in call.captured]


def copy_state(source: Side, target: Side) -> None:
    """Copies the values of all variables, the optimizers' included, to another side."""
    values, variables = (
        keras_optimizers.training_variables(model) + more for model, more in (source, target)
    )
    for value, variable in zip(values, variables, strict=True):
        variable.assign(value.numpy())


def endless_copy(dataset: Any) -> Any:
    """Returns an endless copy for a trial here; the user's dataset loses no rows or orders."""
    from nanotf.compat import dataset_graphs

    copy = dataset_graphs.copy_of(dataset)
    if copy is None:
        raise ShippingError(
            "A trial reads a copy of the dataset. Received: a dataset whose graph TensorFlow "
            "cannot write. Pass a number of processes."
        )
    return copy.repeat()
