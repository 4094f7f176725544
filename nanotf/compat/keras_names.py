"""Private names of both Keras generations, behind one interface.

| name | generation, versions seen | why |
| --- | --- | --- |
| `losses.loss.scale_loss_for_distribution`, `unscale_...` | 3; 3.10-3.15 | the one place where a loss is divided by the number of replicas |
| `utils.losses_utils.scale_loss_for_distribution` | 2; 2.15, tf_keras 2.15-2.21 | same |
| `backend.tensorflow.trainer.reduce_per_replica` | 3 | reduces scalars over axis 0 under several workers (keras-team/keras#20585); sends all outputs of `predict` to all workers |
| `engine.training.reduce_per_replica` | 2 | same of `predict` |
| `backend.tensorflow.trainer.potentially_ragged_concat`, `engine.training.` | 3 / 2 | how `predict` joins batches whose outputs differ in shape |
| `utils.tracking.TrackedList`, `TrackedDict`, `TrackedSet` | 3 | configurations hold some, and they cannot be pickled |
| `Trainer._flatten_metrics_in_order`, `engine.training.flatten_metrics_in_order` | 3 / 2 | the order in which `evaluate` returns metrics |
| `Trainer._maybe_symbolic_build`, `_symbolic_build` | 3 | feeds a per-replica value to a reduction (same issue) |
| `Model._compile_config` | 2 and 3 | the arguments of `compile`, as the user gave them |
| `Model.compiled_loss.build`, `compiled_metrics.build` | 2; 2.15, tf_keras 2.15-2.21 | metrics exist before the first step |
| `Model.compiled_metrics._output_names`, `_metrics`, `_weighted_metrics`, `Metric._name` | 2 | see `metric_names_as_compiled` |
| `Trainer._compile_loss`, `CompileLoss.metrics` | 3; 3.10-3.15 | see `weigh_output_losses` |
| `Optimizer._all_reduce_sum_gradients` | 3; 3.10-3.15 | see `sum_gradients_first` |
| `Model._is_compiled` / `Model.compiled` | 2 / 3 | whether `compile` was called |
| `Model._train_counter`, `_test_counter`, `_predict_counter` | 2 | step counts that the progress bar reads |
| `Optimizer._learning_rate`, legacy `_create_all_weights` | 2 | optimizer state outside `variables` |
| `models.functional.Functional` / `engine.functional.Functional` | 3 / 2 | the class that `Model(inputs, outputs)` makes |
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from nanotf.compat.versions import is_keras_3, keras_module_name, require_tensorflow

_TRAINER_3 = "backend.tensorflow.trainer"
_TRAINER_2 = "engine.training"


def source_module(path: str) -> Any:
    """A module below the Keras package's `src`."""
    return importlib.import_module(f"{keras_module_name()}.src.{path}")


def functional_class() -> type:
    """The class of a model made by `Model(inputs, outputs)`."""
    path = "models.functional" if is_keras_3() else "engine.functional"
    cls: type = source_module(path).Functional
    return cls


def untracked(value: Any) -> Any:
    """A list, dict or set in which Keras 3 tracks variables, as a plain one; None for others."""
    if not is_keras_3():
        return None
    tracking = source_module("utils.tracking")
    kinds = {tracking.TrackedList: list, tracking.TrackedDict: dict, tracking.TrackedSet: set}
    kind = kinds.get(type(value))
    return None if kind is None else kind(value)


def is_compiled(model: Any) -> bool:
    """Whether `model.compile` was called."""
    return bool(model.compiled if is_keras_3() else model._is_compiled)


def compile_arguments(model: Any) -> dict[str, Any]:
    """The arguments that `model.compile` was called with, as the user gave them."""
    return dict(model._compile_config.config)


def callback_list_class() -> type:
    """Keras's own container of callbacks, public in both generations."""
    cls: type = require_tensorflow().keras.callbacks.CallbackList
    return cls


def tf_variable(variable: Any) -> Any:
    """The `tf.Variable` behind a variable of either generation."""
    tf = require_tensorflow()
    return variable if isinstance(variable, tf.Variable) else variable.value


def model_variables(model: Any) -> list[Any]:
    """The variables that training changes in a model, in a fixed order.

    Returns:
        A list of `tf.Variable`: weights, the seeds of random layers, in Keras 2 the counters
        of steps. Metrics are not among them.
    """
    variables = [tf_variable(v) for v in model.variables]
    if not is_keras_3():
        # The progress bar reads them where the number of steps is not known in advance.
        variables += [model._train_counter, model._test_counter]
    return variables


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of a built optimizer: step count, learning rate, slots.

    Returns:
        A list of `tf.Variable` in a fixed order.
    """
    if optimizer is None:
        return []
    found = optimizer.variables
    variables = [tf_variable(v) for v in (found() if callable(found) else found)]
    rate = getattr(optimizer, "_learning_rate", None)  # Keras 2 leaves it out of `variables`
    if not is_keras_3() and hasattr(rate, "assign") and not any(rate is v for v in variables):
        variables.append(rate)
    return variables


def training_variables(model: Any) -> list[Any]:
    """All that a `fit` changes in a model and its optimizer, metrics apart, in a fixed order."""
    return model_variables(model) + optimizer_variables(model.optimizer)


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's slots for the model's trainable variables, if missing."""
    optimizer = model.optimizer
    if optimizer is None:
        return
    if hasattr(optimizer, "_create_all_weights"):  # Keras 2, tf.keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
        return
    if not getattr(optimizer, "built", False) and not getattr(optimizer, "_built", False):
        optimizer.build(model.trainable_variables)


def build_for_training(model: Any, specs: Any) -> None:
    """Creates the variables of metrics and optimizer, which `fit` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `fit` sees it.
    """
    build_metrics(model, specs)
    build_optimizer(model)


def build_metrics(model: Any, specs: Any) -> None:
    """Creates the variables of metrics, which `evaluate` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `evaluate` sees it.
    """
    tf = require_tensorflow()
    if is_keras_3():
        optimizer = model.optimizer
        unbuilt = optimizer is not None and not optimizer.built
        if unbuilt:  # keeps Keras from building it, too
            optimizer.built = True
        try:
            model._symbolic_build(data_batch=specs)
        finally:
            if unbuilt:
                optimizer.built = False
    elif isinstance(specs, tuple) and len(specs) > 1 and not model.compiled_metrics.built:
        outputs = getattr(model, "outputs", None)
        if outputs is None:
            trace = tf.function(model).get_concrete_function(specs[0])
            outputs = trace.structured_outputs
        else:
            outputs = tf.nest.pack_sequence_as(model.output, outputs)
        outputs = tf.nest.map_structure(lambda o: tf.TensorSpec(o.shape, o.dtype), outputs)
        model.compiled_loss.build(outputs)
        model.compiled_metrics.build(outputs, specs[1])
        if not all(metric.built for metric in model.compiled_metrics.metrics):
            # F1Score and its like make their variables at the first update.
            run = tf.distribute.get_strategy().run
            update = model.compiled_metrics.update_state
            tf.function(lambda *args: run(update, args)).get_concrete_function(specs[1], outputs)


@contextlib.contextmanager
def metric_names_as_compiled(model: Any) -> Iterator[None]:
    """Gives metrics, in this context, the names that they had when `compile` got them.

    Keras 2 puts the output's name before the name of the user's metric object when it builds
    the metrics of a model with several outputs, and a worker's copy would get it twice.
    """
    renamed: list[tuple[Any, str]] = []
    built = not is_keras_3() and is_compiled(model) and model.compiled_metrics.built
    if built and len(model.compiled_metrics._output_names) > 1:
        container = model.compiled_metrics
        lists = zip(
            container._output_names, container._metrics, container._weighted_metrics, strict=True
        )
        for output, *metrics in lists:
            prefix = f"{output}_"
            for metric in require_tensorflow().nest.flatten(metrics):
                if metric is not None and metric._name.startswith(prefix):
                    renamed.append((metric, metric._name))
                    metric._name = metric._name[len(prefix) :]
    try:
        yield
    finally:
        for metric, name in renamed:
            metric._name = name


class LossShare:
    """Replaces Keras's division of a loss by the number of replicas.

    Keras divides by the number of replicas, which is right only if all of them hold the same
    number of samples. A worker that holds n_r of the n samples of a global batch must weigh
    its mean by n_r / n, so that the sum over workers is the mean over the batch. The factor is
    known while a step is traced or run; outside of one Keras's own rule holds.
    """

    def __init__(self) -> None:
        self.current: Any = None

    def set(self, share: Any) -> Any:
        """Sets the factor (a scalar float tensor or None) and returns the one before."""
        before, self.current = self.current, share
        return before

    def install(self) -> None:
        """Puts the rule into the installed Keras, in this process."""
        tf = require_tensorflow()
        if is_keras_3():
            module = source_module("losses.loss")
            stock_unscale = module.unscale_loss_for_distribution
        else:
            module = source_module("utils.losses_utils")
        stock_scale = module.scale_loss_for_distribution

        def scale_loss_for_distribution(value: Any) -> Any:
            if self.current is None:
                return stock_scale(value)
            return value * tf.cast(self.current, value.dtype)

        def unscale_loss_for_distribution(value: Any) -> Any:
            if self.current is None:
                return stock_unscale(value)
            # A worker without samples has share 0; what it would report is not counted.
            return tf.math.divide_no_nan(value, tf.cast(self.current, value.dtype))

        module.scale_loss_for_distribution = scale_loss_for_distribution
        if is_keras_3():
            module.unscale_loss_for_distribution = unscale_loss_for_distribution


def weigh_output_losses(model: Any, share: LossShare) -> None:
    """Makes the losses of single outputs means over global batches, as in one process.

    Keras 3 weighs them by a batch's number of rows only where it is known when a step is
    traced, and otherwise counts every batch alike; then every worker's part of a batch must
    count as much as its part of the rows.

    Args:
        model: a model for which `build_for_training` was called.
        share: `LossShare`.
    """
    if not is_keras_3() or model._compile_loss is None:
        return
    for metric in model._compile_loss.metrics:
        stock = metric.update_state

        def update_state(values: Any, sample_weight: Any = None, stock: Any = stock) -> Any:
            return stock(values, share.current if sample_weight is None else sample_weight)

        metric.update_state = update_state


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
    tf = require_tensorflow()
    stock = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        context = tf.distribute.get_replica_context()
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if context is not None and present:
            summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [grads[i] for i in present])
            for i, grad in zip(present, summed, strict=True):
                grads[i] = grad
        return stock(grads, trainable_variables)

    optimizer.apply = apply
    while optimizer is not None:
        # They are summed already; the step itself shall not do it again.
        optimizer._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)
        optimizer = getattr(optimizer, "inner_optimizer", None)


def install_worker_overrides(share: LossShare) -> None:
    """Changes the installed Keras, in a worker's process, so that it trains rightly.

    Args:
        share: `LossShare`, the weight of a worker's part of a global batch.
    """
    share.install()
    # One replica per worker: what a step returns is this worker's value, which is all that its
    # progress report needs. Metrics are summed over workers when they are read. What `predict`
    # concatenates, the parent puts together from all workers.
    trainer = source_module(_TRAINER_3 if is_keras_3() else _TRAINER_2)
    local = {"concat"} | ({"auto", "mean", "first"} if is_keras_3() else set())
    stock = trainer.reduce_per_replica

    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction in local:
            tf = require_tensorflow()
            return tf.nest.map_structure(
                lambda v: strategy.experimental_local_results(v)[0], values
            )
        return stock(values, strategy, reduction)

    trainer.reduce_per_replica = reduce_per_replica


def metric_variables(model: Any) -> list[Any]:
    """The variables of a model's metrics, in a fixed order, for those that are built."""
    return [tf_variable(v) for metric in model.metrics for v in metric.variables]


def metrics_in_order(model: Any, logs: dict[str, Any]) -> Any:
    """What `evaluate` returns for `logs`: a list, or the only value.

    Args:
        model: a model whose metrics are built.
        logs: dict of str to float, by the metrics' names.
    """
    if is_keras_3():
        return model._flatten_metrics_in_order(logs)
    return source_module(_TRAINER_2).flatten_metrics_in_order(logs, model.metrics_names)


def join_batches(batches: list[Any]) -> Any:
    """Joins the outputs of batches as `predict` does: ragged where their shapes differ.

    Args:
        batches: list of tensors, dense, ragged or sparse, with one row for each sample.

    Returns:
        A `numpy.ndarray`, or a ragged or sparse tensor.
    """
    trainer = source_module(_TRAINER_3 if is_keras_3() else _TRAINER_2)
    joined = trainer.potentially_ragged_concat(batches)
    return joined.numpy() if isinstance(joined, require_tensorflow().Tensor) else joined


def step_count(model: Any, method: str) -> int | None:
    """The batches of the last `evaluate` or `predict`, where Keras counts them (Keras 2).

    Args:
        model: a Keras model.
        method: "evaluate" or "predict".
    """
    if is_keras_3():
        return None
    return int(_step_counter(model, method).numpy())


def set_step_count(model: Any, method: str, steps: int | None) -> None:
    """Sets what `step_count` returns; None changes nothing."""
    if steps is not None:
        _step_counter(model, method).assign(steps)


def _step_counter(model: Any, method: str) -> Any:
    return {"evaluate": model._test_counter, "predict": model._predict_counter}[method]
