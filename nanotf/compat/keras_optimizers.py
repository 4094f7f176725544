"""Optimizers of both Keras generations, behind one interface.

Covers their variables and slots, and how they are built.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Optimizer._all_reduce_sum_gradients` | 3; 3.10-3.15 | see `region.sparse_gradients.SummedRows` |
| `Optimizer._var_key`, legacy `_create_all_weights`, `_slots` | 2 and 3 / 2; 2.14, 2.15, tf_keras 2.15-2.21 | the variables that an optimizer was built for |
| `Optimizer._exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern` / `_exclude_from_weight_decay_names` | both / 3 / 2 | see `updates_elements_apart` |
| lists of slots in an optimizer's attributes | 2 and 3 | see `optimizer_slots` |
| `Optimizer._learning_rate`, `_iterations` | 2 and 3 | see `unbuilt_twin` and `step_without_gradients` |
| `Optimizer._backend_apply_gradients` | 3; 3.10-3.15 | see `step_without_gradients` |
| `Optimizer._clip_gradients`, `_deduplicate_sparse_grad` | 2 and 3 / 2 | see `region.sparse_gradients.SummedRows` |
| `optimizers.nadam.Nadam` | 2; 2.14, 2.15, tf_keras 2.15-2.21 | see `depends_on_number` |
| `optimizers.adam.Adam`, its `_momentums`, `_velocities`, `_velocity_hats` | 2 and 3 | see `adam_class`, `adam_slots` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import graphs, keras_common, keras_compiling, keras_layers, keras_metrics
from nanotf.compat.generation import generation
from nanotf.compat.versions import is_keras_3, require_tensorflow

_LARGE = 1 << 16  # elements of a variable whose updates are worth an order
_EXCLUDED = "_exclude_from_weight_decay"
_EXCLUDED_NAMES = ("_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay_names")


def optimizer_classes() -> tuple[type, ...]:
    """Returns the base classes of optimizers; Keras 2 also has a legacy class."""
    optimizers = require_tensorflow().keras.optimizers
    legacy = getattr(getattr(optimizers, "legacy", None), "Optimizer", None)
    return (optimizers.Optimizer, *([legacy] if isinstance(legacy, type) else []))


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Returns the variables of a built optimizer: step count, learning rate, slots.

    Returns:
        A list of `tf.Variable` in a fixed order.
    """
    if optimizer is None:
        return []
    found = optimizer.variables
    variables = [keras_common.tf_variable(v) for v in (found() if callable(found) else found)]
    if is_legacy(optimizer):
        # It keeps them in the order in which they were made, which depends on who made them: a
        # layer's own step for its variables, or one call for all.
        slots = [v for _, of in sorted(_legacy_slots(optimizer)) for v in of]
        known = {id(v) for v in slots}
        variables = [v for v in variables if id(v) not in known] + slots
    beside = [*generation().state_beside(optimizer), *_in_attributes(optimizer)]
    distinct = {id(v): v for v in [*variables, *beside]}
    return list(distinct.values())


def _legacy_slots(optimizer: Any) -> Iterator[tuple[tuple[int, str], list[Any]]]:
    for place, slots in enumerate(optimizer._slots.values()):
        for name, slot in slots.items():
            yield (place, name), [slot]


def _in_attributes(optimizer: Any) -> list[Any]:
    """Returns the variables in an optimizer's attributes, but those that it trains."""
    kinds = (require_tensorflow().Variable, *generation().variable_classes())
    has_keys = is_built(optimizer) and not is_legacy(optimizer)
    keys = generation().places_by_key(optimizer) if has_keys else {}
    return [
        keras_common.tf_variable(value)
        for _, value in sorted(vars(optimizer).items())
        if isinstance(value, kinds) and not (keys and optimizer._var_key(value) in keys)
    ]


def optimizers_of(model: Any) -> list[Any]:
    """Returns all optimizers of a model: its own, then those in its attributes, by attribute name.

    A model with its own `compile`, such as a GAN, keeps one for each of its parts.
    """
    classes = optimizer_classes()
    found = [getattr(model, "optimizer", None)]
    for _, value in sorted(vars(model).items()):
        found += value if isinstance(value, (list, tuple)) else [value]
    distinct: dict[int, Any] = {id(o): o for o in found if isinstance(o, classes)}
    return list(distinct.values())


def with_inner(optimizers: Sequence[Any]) -> list[Any]:
    """Returns optimizers, each loss-scaling one followed by the optimizer that it wraps."""
    found = []
    for optimizer in optimizers:
        while optimizer is not None:
            found.append(optimizer)
            optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def optimizer_slots(optimizer: Any) -> dict[str, list[Any]]:
    """Returns an optimizer's lists of slots, by attribute, with an entry per trained variable.

    Both generations keep each kind of slot in its own list, in the order of the variables. They
    differ in the order of `optimizer.variables`. An entry is None where the variable has no slot of
    that kind: Muon keeps None there, and Keras 2's Adafactor a variable that is not its own state.
    """
    if not is_built(optimizer):
        return {}
    own = {id(variable) for variable in optimizer_variables(optimizer)}
    count = len(generation().places_by_key(optimizer))
    found = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, (list, tuple)) and len(value) == count and name != "_variables":
            behind = [keras_common.tf_variable(v) if hasattr(v, "assign") else None for v in value]
            slots = [v if id(b) in own else None for v, b in zip(value, behind, strict=True)]
            if any(slot is not None for slot in slots):
                found[name] = slots
    return found


def slot_variables(optimizer: Any) -> list[Any]:
    """Returns the `tf.Variable`s that an optimizer keeps for each variable that it trains."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if is_legacy(optimizer):
        return [variable for _, slots in _legacy_slots(optimizer) for variable in slots]
    found = optimizer_slots(optimizer).values()
    return [keras_common.tf_variable(v) for slots in found for v in slots if v is not None]


def variables_beside_slots(optimizer: Any) -> list[Any]:
    """Returns the `tf.Variable`s of an optimizer that are no slots, such as the step count."""
    slots = set(map(id, slot_variables(optimizer)))
    return [v for v in optimizer_variables(optimizer) if id(v) not in slots]


def scaled(optimizer: Any, loss: Any) -> Any:
    """Returns the loss whose gradients an optimizer expects: Keras 3's may have a factor."""
    return optimizer.scale_loss(loss) if is_keras_3() else loss


def step_without_gradients(optimizer: Any) -> None:
    """Counts a step in which an optimizer has no gradients.

    With Keras 3 it also does what one with gradients for other variables does: moving averages of
    all that it trains, and what Nadam keeps for all.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if is_keras_3() and is_built(optimizer):
        optimizer._backend_apply_gradients([], [])
    # Not `iterations`, which Keras 3 computes from it if gradients of several steps are added up.
    optimizer._iterations.assign_add(1)


def depends_on_number(optimizer: Any) -> bool:
    """Returns True if an optimizer's updates depend on how many variables it has.

    Keras 2's Nadam multiplies what it keeps for all variables once for each of them.
    """
    if is_keras_3():
        return False
    return isinstance(optimizer, keras_common.source_module("optimizers.nadam").Nadam)


def unbuilt_twin(optimizer: Any) -> Any:
    """Returns an optimizer of one of Keras's own classes like another, and not built.

    Both have the same step count and learning rate.
    """
    given = vars(optimizer)["_learning_rate"]
    vars(optimizer)["_learning_rate"] = 0.0  # a schedule of the user's need not have a config
    try:
        config = optimizer.get_config()
    finally:
        vars(optimizer)["_learning_rate"] = given
    twin = type(optimizer).from_config(config)
    for name in ("_learning_rate", "_iterations"):
        vars(twin)[name] = vars(optimizer)[name]
    return twin


def updates_elements_apart(optimizer: Any, classes: Sequence[str]) -> bool:
    """Returns True if an optimizer updates every element of a variable separately.

    Args:
        optimizer: a built optimizer, or None.
        classes: names of the classes with element-wise updates.
    """
    # Norms need all elements of a variable, the next two more state; exclusions name variables.
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
    )


def training_variables(model: Any) -> list[Any]:
    """Returns all variables that `fit` changes, except metrics, in a fixed order."""
    variables = generation().model_variables(model)
    for optimizer in optimizers_of(model):
        variables += optimizer_variables(optimizer)
    return variables


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's slots for the model's trainable variables, if missing."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    if is_legacy(optimizer):
        optimizer._create_all_weights(model.trainable_variables)
        return
    if not is_built(optimizer):
        with generation().as_step_builds(model):
            optimizer.build(model.trainable_variables)


def is_built_for(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Returns True if an optimizer is unbuilt or has slots for exactly these variables.

    Args:
        optimizer: an optimizer, or None.
        variables: the trainable variables of a model.
    """
    while hasattr(optimizer, "inner_optimizer"):  # of a loss-scaling optimizer
        optimizer = optimizer.inner_optimizer
    if optimizer is None or is_legacy(optimizer) or not is_built(optimizer):
        return True  # Keras 2's legacy ones make slots on demand
    known = set(generation().places_by_key(optimizer))
    return {optimizer._var_key(variable) for variable in variables} == known


def updates(optimizer: Any, variable: Any) -> bool:
    """Returns True for an optimizer, not of the legacy kind, that has slots for a variable."""
    if is_legacy(optimizer) or not is_built(optimizer):
        return False
    return optimizer._var_key(variable) in generation().places_by_key(optimizer)


@contextlib.contextmanager
def updating_in_order(optimizer: Any) -> Iterator[None]:
    """Makes an optimizer's updates, in a graph, run one operation after the other in this context.

    Nothing else orders them. Adam's update of a variable has temporary values of several times its
    size, and those of all variables at once would take as much memory as weights and slots do. The
    updates of small variables stay as they are, and those of legacy optimizers.
    """
    if is_legacy(optimizer):
        yield
        return
    tf, stock = require_tensorflow(), optimizer.update_step
    last: list[Any] = []

    def update_step(gradient: Any, variable: Any, *learning_rate: Any) -> None:
        if variable.shape.num_elements() < _LARGE:
            stock(gradient, variable, *learning_rate)
            return
        graph = tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations())
        # A branch's operations cannot wait for those of another graph.
        with tf.control_dependencies([op for op in last if op.graph is graph]):
            stock(gradient, variable, *learning_rate)
        made = graph.get_operations()[begin:]
        graphs.run_in_order(made)
        last[:] = made[-1:]

    vars(optimizer)["update_step"] = update_step
    try:
        yield
    finally:
        del vars(optimizer)["update_step"]


def build_for_training(model: Any, specs: Any) -> None:
    """Creates the variables of metrics and optimizers that `fit` would create at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `fit` sees it.
    """
    keras_metrics.build_metrics_for(model, "train_step", specs)
    build_optimizers(model, specs)


def build_optimizers(model: Any, specs: Any, strategy: Any = None) -> None:
    """Creates the optimizer variables that `fit` would create at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, what the model's `train_step` takes.
        strategy: the `tf.distribute.Strategy` that the model trains under, or None.
    """
    legacy = is_legacy(getattr(model, "optimizer", None))
    if legacy or keras_compiling.builds_optimizer_for_all(
        model
    ):  # a legacy one may make slots later
        build_optimizer(model)
    found = optimizers_of(model)
    if not all(map(is_built, found)):
        # Only the user's own step knows which optimizer trains which variables. One that runs
        # eagerly may read values, which a trace lacks; the only optimizer leaves those that it
        # does not train as they are.
        is_only = len(found) == 1 and found[0] is getattr(model, "optimizer", None)
        if not (model.run_eagerly and is_only):
            keras_compiling.trace_step(model, "train_step", specs, strategy)
        build_optimizer(model)  # if no step uses it; in a worker Keras 3 would build it
    if not model.run_eagerly:
        for optimizer in found:
            generation().note_first_trace(optimizer)


def is_legacy(optimizer: Any) -> bool:
    """Returns True for an optimizer of Keras 2's `tf.keras.optimizers.legacy`."""
    return hasattr(optimizer, "_create_all_weights")


def is_built(optimizer: Any) -> bool:
    if is_legacy(optimizer):
        return bool(optimizer.weights)
    return bool(getattr(optimizer, "built", False) or getattr(optimizer, "_built", False))


def adam_class() -> Any:
    """Returns Keras's `Adam`, even while `tf.keras.optimizers.Adam` is nanotf's."""
    return keras_common.source_module("optimizers.adam").Adam


def adam_slots(optimizer: Any, variable: Any) -> tuple[Any, Any, Any]:
    """Returns Adam's slots of a variable, during its update.

    Args:
        optimizer: an Adam.
        variable: the variable, as `update_step` gets it.

    Returns:
        A tuple of `tf.Variable`: first moment, second moment, and the maximum second moment, None
        without `amsgrad`.
    """
    place = generation().places_by_key(optimizer)[optimizer._var_key(variable)]
    maxima = optimizer._velocity_hats[place] if optimizer.amsgrad else None
    first, second = optimizer._momentums[place], optimizer._velocities[place]
    here = keras_layers.variable_here
    return here(first), here(second), None if maxima is None else here(maxima)
