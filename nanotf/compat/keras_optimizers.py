"""Optimizers of both Keras generations, behind one interface.

What they are made of (variables, slots), and how they are built.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Optimizer._all_reduce_sum_gradients` | 3; 3.10-3.15 | see `region.optimizers.SummedRows` |
| `Optimizer._var_key`, legacy `_create_all_weights` | 2 and 3 / 2; 2.15, tf_keras 2.15-2.21 | which variables an optimizer was built for |
| `Optimizer._exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern` / `_exclude_from_weight_decay_names`, `_var_key` | both / 3 / 2 / both | what `exclude_from_weight_decay` was told is not in the configuration |
| lists of slots in an optimizer's attributes | 2 and 3 | see `optimizer_slots` |
| `Optimizer._learning_rate`, legacy `_hyper` | 2 and 3 / 2 | see `schedule_of` |
| `Optimizer._clip_gradients`, `_deduplicate_sparse_grad` | 2 and 3 / 2 | see `region.optimizers.SummedRows` |
| `optimizers.adam.Adam`, its `_momentums`, `_velocities`, `_velocity_hats` | 2 and 3 | see `adam_class`, `adam_slots` |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow

_EXCLUDED = "_exclude_from_weight_decay"
_EXCLUDED_NAMES = ("_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay_names")


def optimizer_classes() -> tuple[type, ...]:
    """The base classes of optimizers; Keras 2 has an older one, too."""
    optimizers = require_tensorflow().keras.optimizers
    legacy = getattr(getattr(optimizers, "legacy", None), "Optimizer", None)
    return (optimizers.Optimizer, *([legacy] if isinstance(legacy, type) else []))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of a built optimizer: step count, learning rate, slots.

    Returns:
        A list of `tf.Variable` in a fixed order.
    """
    if optimizer is None:
        return []
    found = optimizer.variables
    variables = [keras_names.tf_variable(v) for v in (found() if callable(found) else found)]
    known = {id(v) for v in variables}
    return variables + [v for v in generation().state_beside(optimizer) if id(v) not in known]


def optimizers_of(model: Any) -> list[Any]:
    """All optimizers of a model: its own, then those in its attributes, by attribute name.

    A model with a `compile` of its own, as a GAN has, keeps one for each of its parts.
    """
    classes = optimizer_classes()
    found = [getattr(model, "optimizer", None)]
    for _, value in sorted(vars(model).items()):
        found += value if isinstance(value, (list, tuple)) else [value]
    distinct: dict[int, Any] = {id(o): o for o in found if isinstance(o, classes)}
    return list(distinct.values())


def with_inner(optimizers: Sequence[Any]) -> list[Any]:
    """Optimizers, and after each loss-scaling one that which it wraps."""
    found = []
    for optimizer in optimizers:
        while optimizer is not None:
            found.append(optimizer)
            optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def optimizer_slots(optimizer: Any) -> dict[str, list[Any]]:
    """The optimizer's lists of slots, by attribute: one slot for each variable it was built with.

    Both generations keep each kind of slot in a list of its own, in the order of the variables;
    they differ in the order of `optimizer.variables`.
    """
    own = {id(variable) for variable in optimizer_variables(optimizer)}
    return {
        name: list(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, (list, tuple))
        and name not in ("_variables", "_trainable_variables")
        and len(value) > 0
        and all(hasattr(v, "assign") and id(keras_names.tf_variable(v)) in own for v in value)
    }


# --------------------------------------------------------------------------- how they are made
def schedule_of(optimizer: Any) -> Any:
    """The `LearningRateSchedule` of an optimizer, or None."""
    schedule = require_tensorflow().keras.optimizers.schedules.LearningRateSchedule
    hypers = vars(optimizer).get("_hyper", {})  # of tf.keras.optimizers.legacy
    found = vars(optimizer).get("_learning_rate", hypers.get("learning_rate"))
    return found if isinstance(found, schedule) else None


def rate_of(optimizer: Any) -> Any:
    """The learning rate of an optimizer: a schedule, or a number."""
    schedule = schedule_of(optimizer)
    return float(optimizer.learning_rate) if schedule is None else schedule


@functools.cache
def own_attributes() -> frozenset[str]:
    """The attributes that are not a user's: those that Keras keeps in every optimizer for itself.

    The public ones are arguments of `__init__`, and change what the optimizer does.
    """
    made = generation().plain_optimizers()
    names = {name for optimizer in made for name in vars(optimizer) if name.startswith("_")}
    return frozenset({*names, _EXCLUDED, *_EXCLUDED_NAMES})


def excluded_by_name(optimizer: Any) -> dict[str, Any]:
    """The attributes that say which variables, by name, are excluded from weight decay."""
    found = {name: vars(optimizer).get(name) for name in _EXCLUDED_NAMES}
    return {name: value for name, value in found.items() if value}


def excludes_variables(optimizer: Any) -> bool:
    """Whether an optimizer was told of variables that are excluded from weight decay."""
    return bool(vars(optimizer).get(_EXCLUDED))


def excluded_places(optimizer: Any, variables: Sequence[Any]) -> tuple[int, ...]:
    """Which variables an optimizer was told to exclude from weight decay, by place.

    Args:
        optimizer: an optimizer.
        variables: sequence of `tf.Variable`.
    """
    excluded = vars(optimizer).get(_EXCLUDED) or ()
    if not excluded:  # legacy optimizers of Keras 2 know no keys
        return ()
    keys = [optimizer._var_key(variable) for variable in variables]
    return tuple(place for place, key in enumerate(keys) if key in excluded)


def exclude_places(optimizer: Any, variables: Sequence[Any], places: Sequence[int]) -> None:
    """Excludes variables from weight decay, as `excluded_places` says."""
    if places:
        keys = [optimizer._var_key(variables[place]) for place in places]
        setattr(optimizer, _EXCLUDED, generation().EXCLUDED_KEYS(keys))


def updates_elements_apart(optimizer: Any, classes: Sequence[str]) -> bool:
    """Whether an optimizer updates every element of a variable by itself, and keeps slots.

    Args:
        optimizer: a built optimizer, or None.
        classes: sequence of str, the names of the classes that may.
    """
    others = (
        "clipnorm",
        "global_clipnorm",
        "use_ema",
        "gradient_accumulation_steps",
        _EXCLUDED,
        *_EXCLUDED_NAMES,
    )
    return (
        type(optimizer).__name__ in classes
        and hasattr(optimizer, "update_step")  # not the oldest kind of Keras 2
        and not any(getattr(optimizer, name, None) for name in others)
        # Keras 2 keeps slots for it, too.
        and not (type(optimizer).__name__ == "SGD" and not optimizer.momentum)
    )


def training_variables(model: Any) -> list[Any]:
    """All that a `fit` changes in a model and its optimizers, metrics apart, in a fixed order."""
    variables = generation().model_variables(model)
    for optimizer in optimizers_of(model):
        variables += optimizer_variables(optimizer)
    return variables


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's slots for the model's trainable variables, if missing."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    if hasattr(optimizer, "_create_all_weights"):  # Keras 2, tf.keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
        return
    if not _is_built(optimizer):
        optimizer.build(model.trainable_variables)


def is_built_for(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether an optimizer, if it is built, has slots for just these variables.

    Args:
        optimizer: an optimizer, or None.
        variables: sequence of the trainable variables of a model.
    """
    while hasattr(optimizer, "inner_optimizer"):  # of a loss-scaling optimizer
        optimizer = optimizer.inner_optimizer
    if optimizer is None or hasattr(optimizer, "_create_all_weights") or not _is_built(optimizer):
        return True  # Keras 2's legacy ones get slots as they need them
    known = set(generation().places_by_key(optimizer))
    return {optimizer._var_key(variable) for variable in variables} == known


def build_for_training(model: Any, specs: Any) -> None:
    """Creates the variables of metrics and optimizers, which `fit` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `fit` sees it.
    """
    own = keras_names.has_own_step(model)
    trace = functools.partial(keras_names.trace_step, model, "train_step", specs)
    keras_names.build_metrics(model, specs, trace if own else None)
    build_optimizers(model, specs)


def build_optimizers(model: Any, specs: Any, strategy: Any = None) -> None:
    """Creates the variables of all optimizers of a model, which `fit` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, what the model's `train_step` takes.
        strategy: the `tf.distribute.Strategy` that the model trains under, or None.
    """
    legacy = hasattr(getattr(model, "optimizer", None), "_create_all_weights")
    if legacy or keras_names.builds_optimizer_for_all(model):  # a legacy one may get slots later
        build_optimizer(model)
    if not all(_is_built(optimizer) for optimizer in optimizers_of(model)):
        # Only the user's own step knows which optimizer trains which variables.
        keras_names.trace_step(model, "train_step", specs, strategy)
        build_optimizer(model)  # which no step uses; in a worker Keras 3 would build it


def _is_built(optimizer: Any) -> bool:
    if hasattr(optimizer, "_create_all_weights"):  # Keras 2, tf.keras.optimizers.legacy
        return bool(optimizer.weights)
    return bool(getattr(optimizer, "built", False) or getattr(optimizer, "_built", False))


def adam_class() -> Any:
    """Keras's `Adam`, also where `tf.keras.optimizers.Adam` is nanotf's."""
    return keras_names.source_module("optimizers.adam").Adam


def adam_slots(optimizer: Any, variable: Any) -> tuple[Any, Any, Any]:
    """Adam's slots of a variable, where that is being updated.

    Args:
        optimizer: an Adam.
        variable: the variable, as `update_step` gets it.

    Returns:
        A tuple of `tf.Variable`: first moment, second moment, and its maximum, which is None
        without `amsgrad`.
    """
    place = generation().places_by_key(optimizer)[optimizer._var_key(variable)]
    maxima = optimizer._velocity_hats[place] if optimizer.amsgrad else None
    first, second = optimizer._momentums[place], optimizer._velocities[place]
    here = keras_names.variable_here
    return here(first), here(second), None if maxima is None else here(maxima)


def built_with(optimizer: Any, candidates: Sequence[Any]) -> list[Any]:
    """The variables, in order, that an optimizer's slots were made for; none if it is not built.

    Args:
        optimizer: an optimizer.
        candidates: sequence of `tf.Variable`, among which they are.

    Returns:
        A list of `tf.Variable`; of Keras 2 with None for one that is not among them.
    """
    return generation().built_with(getattr(optimizer, "inner_optimizer", optimizer), candidates)
