"""Optimizers of both Keras generations, behind one interface.

What they are made of (variables, slots), how they are built, how workers make them sum gradients,
and where the share (`keras_share`) enters the gradients.

| name | generation, versions seen | why |
| --- | --- | --- |
| `Optimizer._all_reduce_sum_gradients` | 3; 3.10-3.15 | see `sum_gradients_first`, `SummedRows` |
| `LossScaleOptimizer._loss_scale`, its `_current_loss_scale`, `_counter` | 2; 2.15, tf_keras 2.15-2.21 | state outside `variables` |
| `Optimizer._trainable_variables_indices`, `_index_dict`, `_var_key` | 3 / 2 / both | which variables an optimizer was built for |
| `Optimizer._learning_rate`, legacy `_create_all_weights`, `_hyper` | 2 | optimizer state outside `variables` |
| `Optimizer._exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern` / `_exclude_from_weight_decay_names`, `_var_key` | both / 3 / 2 / both | what `exclude_from_weight_decay` was told is not in the configuration |
| lists of slots in an optimizer's attributes | 2 and 3 | see `optimizer_slots` |
| `Optimizer._learning_rate`, legacy `_hyper` | 2 and 3 / 2 | see `schedule_of` |
| `Optimizer._trainable_variables` / `_index_dict`, legacy `_slots`, `tf.Variable._unique_id` | 3; 3.10-3.15 / 2; 2.15, tf_keras 2.15-2.21 | see `built_with` |
| `mixed_precision.loss_scale_optimizer.LossScaleOptimizer`, `LossScaleOptimizerV3` | 2; 2.15, tf_keras 2.15-2.21 | their `apply_gradients` |
| `Optimizer._clip_gradients`, `_deduplicate_sparse_grad` | 2 and 3 / 2 | see `SummedRows` |
| `DistributedVariable._aggregation` | TensorFlow 2.15-2.21 | see `_updating` |
| `optimizers.adam.Adam`, its `_momentums`, `_velocities`, `_velocity_hats` | 2 and 3 | see `adam_class`, `adam_slots` |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import is_keras_3, require_tensorflow
from nanotf.errors import NanoError
from nanotf.region.share import Share

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
    rate = getattr(optimizer, "_learning_rate", None)  # Keras 2 leaves it out of `variables`
    if not is_keras_3() and hasattr(rate, "assign") and not any(rate is v for v in variables):
        variables.append(rate)
    hypers = getattr(optimizer, "_hyper", {})  # of tf.keras.optimizers.legacy
    variables += [v for _, v in sorted(hypers.items()) if hasattr(v, "assign")]
    scale = getattr(optimizer, "_loss_scale", None)  # Keras 2's LossScaleOptimizer, same
    for name in ("_current_loss_scale", "_counter"):
        value = getattr(scale, name, None)
        if value is not None and not any(value is v for v in variables):
            variables.append(value)
    return variables


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
    optimizers = require_tensorflow().keras.optimizers
    made = [optimizers.SGD(name="nanotf")]  # a name, or later ones get other numbers
    if not is_keras_3() and len(optimizer_classes()) > 1:
        made.append(optimizers.legacy.SGD(name="nanotf"))
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
        setattr(optimizer, _EXCLUDED, set(keys) if is_keras_3() else keys)


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


def make_variable(value: Any, name: str) -> Any:
    """A trainable variable of the installed generation, which its optimizers accept."""
    tf = require_tensorflow()
    if is_keras_3():
        return tf.keras.Variable(value, name=name)
    return tf.Variable(value, name=name)


def training_variables(model: Any) -> list[Any]:
    """All that a `fit` changes in a model and its optimizers, metrics apart, in a fixed order."""
    variables = keras_names.model_variables(model)
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
    known = optimizer._trainable_variables_indices if is_keras_3() else optimizer._index_dict
    return {optimizer._var_key(variable) for variable in variables} == set(known)


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


# ----------------------------------------------------------------------------- sparse gradients
class SummedRows:
    """Mixed in before an optimizer class to which a sparse gradient is its sum by rows.

    A row that occurs several times in a `tf.IndexedSlices` counts as the sum of its values, in
    clipping, too, for which Keras takes them one by one. So they can be summed in each worker
    before it sends them.

    Without workers each gradient is summed once, since XLA cannot do it twice, see `sum_rows`.
    """

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Keras 2's sum over workers; those of other workers may bring the same rows."""
        if _has_replicas():
            grads_and_vars = [(sum_rows(grad), variable) for grad, variable in grads_and_vars]
        return super().aggregate_gradients(grads_and_vars)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """What both generations do first with the gradients of an update."""
        tf = require_tensorflow()
        grads = [sum_rows(gradient) for gradient in grads]
        limit = getattr(self, "global_clipnorm", None)
        if limit and any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
            return tf.clip_by_global_norm(grads, limit)[0]  # Keras 3 would make them dense
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _deduplicate_sparse_grad(self, grads: Any) -> Any:
        """Keras 2 would sum them again."""
        return grads

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        """Keras 3's sum over replicas of TensorFlow's own strategies comes after clipping."""
        pairs = super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return [(sum_rows(grad), var) for grad, var in pairs] if _has_replicas() else pairs


def _has_replicas() -> bool:
    return bool(require_tensorflow().distribute.get_strategy().num_replicas_in_sync > 1)


def sum_rows(gradient: Any) -> Any:
    """A sparse gradient in which each row occurs once; others as they are.

    In what XLA compiles the length of the result is known only when it runs. XLA's `tf.unique`
    takes the padding of such a vector for rows, so the result must not be summed again there.
    """
    tf = require_tensorflow()
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


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
    places = optimizer._trainable_variables_indices if is_keras_3() else optimizer._index_dict
    place = places[optimizer._var_key(variable)]
    maxima = optimizer._velocity_hats[place] if optimizer.amsgrad else None
    first, second = optimizer._momentums[place], optimizer._velocities[place]
    here = keras_names.variable_here
    return here(first), here(second), None if maxima is None else here(maxima)


# ------------------------------------------------------------------------ summed over workers
def sum_over_workers(grads: Sequence[Any], optimizer: Any = None) -> list[Any]:
    """Sums gradients over the workers, in replica context; a None stays one.

    Args:
        grads: sequence of tensors, `tf.IndexedSlices` and None.
        optimizer: the optimizer that is to get them, or None.
    """
    tf = require_tensorflow()
    context = tf.distribute.get_replica_context()
    if isinstance(getattr(optimizer, "inner_optimizer", optimizer), SummedRows):
        grads = [sum_rows(gradient) for gradient in grads]
    present = [i for i, grad in enumerate(grads) if grad is not None]
    result = list(grads)
    if context is not None and present:
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [grads[i] for i in present])
        for i, grad in zip(present, summed, strict=True):
            result[i] = grad
    return result


def sum_gradients_first(optimizer: Any) -> None:
    """Makes an optimizer of Keras 3 sum gradients over workers before it looks at them.

    Keras 3 sums them after clipping and accumulating, and after a loss-scaling optimizer has
    looked for infinities, so that each worker would clip its own part of the gradient and
    decide by itself whether to take the step. Keras 2 sums them first.

    Args:
        optimizer: the model's optimizer, in a worker; None does nothing.
    """
    if not is_keras_3() or optimizer is None:
        return
    stock, given = optimizer.apply, optimizer

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        return stock(sum_over_workers(list(grads), given), trainable_variables)

    optimizer.apply = apply
    while optimizer is not None:
        # They are summed already; the step itself shall not do it again.
        optimizer._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)
        optimizer = getattr(optimizer, "inner_optimizer", None)


def built_with(optimizer: Any, candidates: Sequence[Any]) -> list[Any]:
    """The variables, in order, that an optimizer's slots were made for; none if it is not built.

    Args:
        optimizer: an optimizer.
        candidates: sequence of `tf.Variable`, among which they are.

    Returns:
        A list of `tf.Variable`.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if is_keras_3():
        return [keras_names.tf_variable(v) for v in optimizer._trainable_variables or ()]
    by_key = {getattr(v, "_unique_id", None): v for v in candidates}
    legacy = hasattr(optimizer, "_create_all_weights")
    keys = optimizer._slots if legacy else getattr(optimizer, "_index_dict", {})
    return [by_key[key] for key in keys if key in by_key]


def build_for(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's slots for variables of the installed generation."""
    if not is_keras_3():
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(optimizer, "_create_all_weights"):  # tf.keras.optimizers.legacy
            optimizer._create_all_weights(variables)
            return
    optimizer.build(variables)


def apply_through(optimizer: Any, apply: Callable[[Any, Any, Any], None]) -> None:
    """Makes an optimizer hand gradients to a function instead of summing and applying them.

    Args:
        optimizer: the model's optimizer, in a worker.
        apply: function of `update` (the stock function, of lists of summed gradients and of
            variables), the list of gradients and the list of variables.
    """
    if is_keras_3():
        stock = optimizer.apply
        optimizer._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)

        def apply_3(grads: Any, trainable_variables: Any = None) -> Any:
            apply(stock, list(grads), list(trainable_variables))
            return optimizer.iterations

        optimizer.apply = apply_3
        return
    stock_gradients = optimizer.apply_gradients

    def update(grads: Any, variables: Any) -> None:
        pairs = zip(grads, variables, strict=True)
        stock_gradients(list(pairs), skip_gradients_aggregation=True)

    def apply_gradients(grads_and_vars: Any, *_: Any, **__: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        apply(update, list(grads), list(variables))
        return optimizer.iterations

    optimizer.apply_gradients = apply_gradients


# ---------------------------------------------------------------------- weighed by the share
def update_in_branches(optimizer: Any, strategy: Any) -> None:
    """Lets an optimizer of Keras 3 update variables inside a branch of `tf.cond`.

    It does so to accumulate gradients, and to overwrite weights with their averages.

    Args:
        optimizer: an optimizer, in a worker.
        strategy: `strategy.WorkerStrategy`.
    """
    if not is_keras_3() or not _has_branches(optimizer):
        return
    stock = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        with strategy.without_merging():
            return stock(grads, trainable_variables)

    optimizer.apply = apply


def install_in_optimizers(share: Share, strategy: Any) -> None:
    """Makes all optimizers follow the share in steps of the user's.

    Those that such code makes itself among them, which is why classes are changed here.

    Args:
        share: `Share`.
        strategy: `strategy.WorkerStrategy`.
    """
    keras = require_tensorflow().keras
    if is_keras_3():
        _stay_summed(keras.optimizers.Optimizer, share)
        for cls in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            _follow_share_in_apply(cls, share, strategy)
        return
    scaling = keras_names.source_module("mixed_precision.loss_scale_optimizer")
    for cls in (
        keras.optimizers.Optimizer,
        keras.optimizers.legacy.Optimizer,
        scaling.LossScaleOptimizer,
        scaling.LossScaleOptimizerV3,
    ):
        _follow_share_in_apply_gradients(cls, share, strategy)


def _check_place(share: Share) -> None:
    """Raises `NanoError` where a worker would update variables with its own gradients alone."""
    if share.in_loop and require_tensorflow().distribute.in_cross_replica_context():
        raise NanoError(
            "Inside of a @nano function variables are updated in steps that the workers share. "
            "Received: an optimizer that is called outside of one. Put @nano_multiprocessing on "
            "the function that calls it, or call that with get_strategy().run()."
        )


def _stay_summed(cls: Any, share: Share) -> None:
    stock = cls._all_reduce_sum_gradients

    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        return list(grads_and_vars) if share.applying else stock(self, grads_and_vars)

    cls._all_reduce_sum_gradients = _all_reduce_sum_gradients


def _follow_share_in_apply(cls: Any, share: Share, strategy: Any) -> None:
    stock = cls.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        _check_place(share)
        if not share.weighs_gradients or share.applying:
            return stock(self, grads, trainable_variables)
        share.applying = True
        try:
            if strategy.in_inner_graph() and not self.built:  # a branch keeps no variables
                with require_tensorflow().init_scope():
                    self.build(trainable_variables)
            with _updating(self, strategy):
                return stock(self, weighed_sum(grads, share, self), trainable_variables)
        finally:
            share.applying = False

    cls.apply = apply


def _follow_share_in_apply_gradients(cls: Any, share: Share, strategy: Any) -> None:
    stock = cls.apply_gradients
    options = inspect.signature(stock).parameters

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        _check_place(share)
        if not share.weighs_gradients or share.applying:
            return stock(self, grads_and_vars, *args, **kwargs)
        share.applying = True
        try:
            with _updating(self, strategy):
                pairs = list(grads_and_vars)
                if all(gradient is None or share.is_whole(gradient) for gradient, _ in pairs):
                    given = next((n for n in _SUMMED if n in options), None)
                    if given is not None:
                        return stock(self, pairs, *args, **{**kwargs, given: _SUMMED[given]})
                pairs = _weighed_pairs(pairs, kwargs, share)
                return stock(self, pairs, *args, **kwargs)
        finally:
            share.applying = False

    cls.apply_gradients = apply_gradients


@contextlib.contextmanager
def _updating(optimizer: Any, strategy: Any) -> Iterator[None]:
    """Lets an optimizer update variables wherever the code stands, in a branch, too.

    A replica cannot leave a branch for the update, nor to take the first worker's value of the
    optimizer's own variables, its count of steps among them: they are alike on all.
    """
    if not strategy.in_inner_graph():
        with strategy.without_merging() if _has_branches(optimizer) else contextlib.nullcontext():
            yield
        return
    variables = [v for v in optimizer_variables(optimizer) if hasattr(v, "_aggregation")]
    before = [v._aggregation for v in variables]
    for variable in variables:
        variable._aggregation = require_tensorflow().VariableAggregation.NONE
    try:
        yield
    finally:
        for variable, aggregation in zip(variables, before, strict=True):
            variable._aggregation = aggregation


# Keras 2's options that say that gradients are summed already.
_SUMMED = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}


def weighed_sum(grads: Sequence[Any], share: Share, optimizer: Any = None) -> list[Any]:
    """Gradients of the global batch, from those of this worker's rows.

    Args:
        grads: sequence of tensors, `tf.IndexedSlices` and None; those that are of the global batch
            are left as they are, if all are.
        share: `Share`.
        optimizer: as in `sum_over_workers`.
    """
    if all(gradient is None or share.is_whole(gradient) for gradient in grads):
        return list(grads)
    return sum_over_workers([_weighed(gradient, share) for gradient in grads], optimizer)


def _has_branches(optimizer: Any) -> bool:
    """Whether an optimizer of Keras 3 updates variables inside a branch of `tf.cond`."""
    return bool(
        getattr(optimizer, "gradient_accumulation_steps", None)
        or getattr(optimizer, "ema_overwrite_frequency", None)
    )


def _weighed(gradient: Any, share: Share) -> Any:
    tf = require_tensorflow()
    if gradient is None or share.current is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(share.of(gradient.values), gradient.indices, gradient.dense_shape)
    return share.of(gradient)


def _weighed_pairs(grads_and_vars: Any, options: Any, share: Share) -> list[tuple[Any, Any]]:
    """Gradients and variables; a step that sums the gradients itself must know what it does."""
    summed = options.get("skip_gradients_aggregation") or not options.get(
        "experimental_aggregate_gradients", True
    )
    return [(g if summed else _weighed(g, share), v) for g, v in grads_and_vars]


def weigh_loss(optimizer: Any, share: Share) -> None:
    """Makes Keras 3's own `train_step` multiply the loss by the share, before its gradient."""
    if optimizer is None or not is_keras_3():
        return
    stock = optimizer.scale_loss

    def scale_loss(loss: Any) -> Any:
        return stock(loss if share.current is None else share.of(loss))

    optimizer.scale_loss = scale_loss
