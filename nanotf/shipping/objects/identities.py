"""The user's objects that have an identity, and the variables that belong to them.

Both sides of a call run these functions on their own objects, and must get results in the same
order.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

from nanotf.compat import (
    keras_common,
    keras_metrics,
    keras_models,
    keras_optimizers,
    values,
)
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow


def data_classes() -> tuple[type, ...]:
    """Returns the classes that yield the batches of a loop, and are read in the parent."""
    tf = require_tensorflow()
    return tf.data.Dataset, tf.data.Iterator, types.GeneratorType


def is_root(value: Any) -> bool:
    """Returns True if a value must not be duplicated: it has variables, or yields data."""
    return isinstance(value, (*_root_classes(), *data_classes()))


@functools.cache
def _root_classes() -> tuple[type, ...]:
    tf = require_tensorflow()
    keras = tf.keras
    return (
        keras.layers.Layer,
        keras.metrics.Metric,
        tf.Variable,
        tf.train.Checkpoint,
        tf.summary.SummaryWriter,
        *keras_optimizers.optimizer_classes(),
        *generation().variable_classes(),
        *generation().seed_generator_classes(),
    )


def holds_variables(obj: Any) -> bool:
    """Returns True if an object makes variables that `variables_of` can list."""
    tf = require_tensorflow()
    kinds = (tf.keras.layers.Layer, tf.keras.metrics.Metric, tf.train.Checkpoint)
    return isinstance(obj, (*kinds, *keras_optimizers.optimizer_classes()))


def variables_of(holder: Any) -> list[Any]:
    """Returns the variables with values that an object holds, in a fixed order.

    Returns:
        `tf.Variable`s; for a model, without those of its optimizers.
    """
    tf = require_tensorflow()
    if isinstance(holder, tf.train.Checkpoint):
        found = [holder.save_counter]
    elif isinstance(holder, keras_optimizers.optimizer_classes()):
        found = keras_optimizers.optimizer_variables(holder)
    elif isinstance(holder, tf.keras.metrics.Metric):
        found = generation().variables_of_metric(holder)
    else:
        try:
            found = keras_common.tf_variables(holder)
            if isinstance(holder, keras_models.model_class()):
                found = generation().model_variables(holder) + keras_metrics.metric_variables(
                    holder
                )
        except ValueError:  # Keras 2, for a model that is not built
            return []
    whole = (values.behind(variable) for variable in found if hasattr(variable, "assign"))
    return [variable for variable in whole if has_value(variable)]


def distinct_variables(numbered: Sequence[Any]) -> list[Any]:
    """Returns the variables with values among objects and in them, each once.

    Args:
        numbered: see `shipping.objects.heap`.

    Returns:
        `tf.Variable`s in a fixed order.
    """
    tf = require_tensorflow()
    found = {id(obj): obj for obj in numbered if has_value(obj)}
    for holder in numbered:  # the variables of all others are numbered themselves
        if isinstance(holder, tf.train.Checkpoint):
            found.update({id(v): v for v in variables_of(holder)})
    return list(found.values())


def all_variables(numbered: Sequence[Any]) -> list[Any]:
    """Returns `distinct_variables`, then the variables made since the objects were sent."""
    found = {id(v): v for v in distinct_variables(numbered)}
    for holder in filter(holds_variables, numbered):
        found.update({id(v): v for v in variables_of(holder)})
    return list(found.values())


def has_value(obj: Any) -> bool:
    """Returns True if an object is a `tf.Variable` with its own numbers and a known shape."""
    return keras_common.holds_numbers(obj) and values.behind(obj) is obj
