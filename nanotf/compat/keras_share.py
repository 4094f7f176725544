"""A worker's part of a global batch, wherever Keras reduces over a batch.

A worker holds n_r of the n rows of a global batch: its share is n_r / n. Inside a step every
loss is what Keras would make of the worker's rows alone, *a mean over them* or something that
takes the place of one, so that the sum over workers of `share * loss` is the loss of the batch,
and the sum of `share * gradient` its gradient. What is no mean over rows is made one here:

| in one process | in a worker |
| --- | --- |
| mean over the batch | mean over the worker's rows |
| sum over the batch | the worker's sum, divided by the share |
| no reduction, in a loss of `compile` (of which Keras takes the sum) | the worker's values, divided by the share |
| no reduction, in a loss that the user's code calls | the worker's values: a mean over them follows |
| `tf.nn.compute_average_loss`, `scale_regularization_loss` | what they are in one process, divided by the share where it is a sum over rows |
| mean over what a mask leaves, or divided by the sum of weights | the counts are those of all workers |
| a loss or metric function that returns a scalar | computed on the rows of all workers; only the worker's own rows have a gradient |
| a scalar handed to the metric `Mean` | counts as much as the share |
| a metric whose state need not be a sum over rows, see `takes_whole_batch` | updated with the rows of all workers, by each of them: all hold the same state |
| a loss of `compile` in bfloat16 or float16 | the same mean, in float32: the share has no place in their bits |

The share enters the gradient in one place. Where Keras's own `train_step` runs it is the loss,
since that costs nothing. Where the user's runs it is the gradients, since nobody knows how the
loss came about.

The private names of both generations that this takes:

| name | generation, versions seen | why |
| --- | --- | --- |
| `losses.loss.scale_loss_for_distribution`, `unscale_...` | 3; 3.10-3.15 | Keras divides a loss by the number of replicas, which is right only where all hold the same number of rows |
| `losses.loss.apply_mask`, `reduce_values` | 3; 3.10-3.15 | masked means, sums |
| `utils.losses_utils.scale_loss_for_distribution`, `apply_valid_mask`, `apply_mask`, `reduce_weighted_loss` | 2; 2.15, tf_keras 2.15-2.21 | same |
| `CompileLoss._flat_losses`, `CompileMetrics.metrics`, `Model._loss_tracker` | 3; 3.10-3.15 | the loss and metric objects of a model |
| `LossesContainer._losses`, `_total_loss_mean`, `_per_output_metrics`, `MetricsContainer.metrics` | 2; 2.15, tf_keras 2.15-2.21 | same |
| `CompileLoss.__call__` / `LossesContainer.__call__` | 3 / 2 | tells the losses of `compile` from those that the user's code calls |
| `Loss._get_reduction`, `_allow_sum_over_batch_size` | 2; 2.15, tf_keras 2.15-2.21 | under a strategy it refuses a mean in the user's own step, for which there is a share |
| `backend.tensorflow.nn._compute_moments_sync` / `BatchNormalizationBase._sync_calculate_mean_and_var` | 3 / 2 | synchronized batch normalisation counts a row that stands in for none |
| `Layer.activity_regularizer`, an attribute made a property | 3; 3.10-3.13 | see `_sum_activities` |
| `LossFunctionWrapper.fn`, `MeanMetricWrapper._fn`, `_fn_kwargs` | 2 and 3 | the user's function in them, and the `axis` that Keras's own reduce over |
| `DistributedVariable._aggregation` | TensorFlow 2.15-2.21 | Keras makes all state of metrics a sum over replicas |
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import (
    is_keras_3,
    keras_module_name,
    keras_version,
    require_tensorflow,
)
from nanotf.errors import NanoError

_MEANS_OF_3 = ("mean", "sum_over_batch_size")


class Share:
    """The part of the global batch that this worker's rows are, while a step is traced or run.

    Outside of a step it is None, and Keras's own rules hold.

    Attributes:
        current: scalar float tensor or None.
        of_compile: bool, whether the losses of `compile` are being computed.
        in_loop: bool, whether a `@nano` function runs.
        applying: bool, whether an optimizer is updating, in a step of that function.
        whole_results: bool, whether results of metrics, in a step, are those of all workers.
        has_results: bool, whether a step has asked for any.
        has_all_rows: bool, whether the code that runs sees the rows of all workers.
    """

    def __init__(self) -> None:
        self.current: Any = None
        self.of_compile = False
        self.in_loop = False
        self.applying = False
        self.whole_results = False
        self.has_results = False
        self.has_all_rows = False
        self._remembered: dict[int, Any] = {}
        self._graph: Any = None  # that a step's own code is traced in; None for an eager step
        self._whole: dict[int, Any] = {}
        self.read: Callable[[Any], Any] | None = None  # what a step makes of elements it reads

    @contextlib.contextmanager
    def reading(self, read: Callable[[Any], Any]) -> Iterator[None]:
        """In this context iterators hand out what `read` makes of their elements."""
        before, self.read = self.read, read
        try:
            yield
        finally:
            self.read = before

    def begin_step(self) -> None:
        """A step of a `@nano` function begins."""
        self._graph = _graph_here()

    def end_step(self) -> None:
        """It has ended; lets go of its gradients."""
        self._graph = None
        self._whole.clear()

    def in_own_graph(self) -> bool:
        """Whether the code of such a step runs, and no branch or function inside of it."""
        return self.in_loop and self.current is not None and self._graph is _graph_here()

    def note_whole(self, gradient: Any) -> None:
        """Takes notice of a gradient that is that of the global batch."""
        self._whole[id(gradient)] = gradient

    def is_whole(self, gradient: Any) -> bool:
        """Whether a gradient is one of those."""
        return id(gradient) in self._whole

    def set(self, share: Any) -> Any:
        """Sets the share (a scalar float tensor or None) and returns the one before."""
        before, self.current = self.current, share
        return before

    @contextlib.contextmanager
    def of_all_rows(self) -> Iterator[None]:
        """Code that runs in this context sees the rows of all workers: its share is 1."""
        tf = require_tensorflow()
        before = self.set(tf.ones([], tf.float64))
        self.has_all_rows = True
        try:
            yield
        finally:
            self.has_all_rows = False
            self.set(before)

    def remember(self, variables: Any, values: Any) -> None:
        """Takes the values from before a step whose rows may stand in for none."""
        self._remembered = {id(v): value for v, value in zip(variables, values, strict=True)}

    def counted(self, variable: Any) -> Any:
        """The value of a variable of this rank, without what rows that stand in left in it."""
        tf = require_tensorflow()
        value = variable.read_value()
        before = self._remembered.get(id(variable))
        return value if before is None else tf.where(self.current > 0, value, before)

    def of(self, value: Any) -> Any:
        """`value * share`, and 0 where the share is 0, whatever the value."""
        tf = require_tensorflow()
        wide = _widened(value)
        part = tf.cast(wide * tf.cast(self.current, wide.dtype), value.dtype)
        return tf.where(self.current > 0, part, tf.zeros_like(part))

    def undone(self, value: Any) -> Any:
        """`value / share`, and 0 where the share is 0."""
        tf = require_tensorflow()
        wide = _widened(value)
        return tf.cast(tf.math.divide_no_nan(wide, tf.cast(self.current, wide.dtype)), value.dtype)

    def total(self, value: Any) -> Any:
        """The sum over workers of a scalar; those with share 0 count nothing."""
        tf = require_tensorflow()
        context = tf.distribute.get_replica_context()
        if self.has_all_rows:
            return tf.stop_gradient(value)
        present = tf.where(self.current > 0, value, tf.zeros_like(value))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(present))


def _graph_here() -> Any:
    tf = require_tensorflow()
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _widened(value: Any) -> Any:
    """A 16-bit float as float32, anything else as it is.

    A share that is rounded to the 8 bits of bfloat16 is off by up to 0.2 %, and with it whatever
    it weighs, in every step.
    """
    tf = require_tensorflow()
    return tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value


def install(share: Share) -> None:
    """Puts the rules into the installed Keras, in a worker's process."""
    if is_keras_3():
        _install_in_3(share, keras_names.source_module("losses.loss"))
    else:
        _install_in_2(share, keras_names.source_module("utils.losses_utils"))
    _weigh_scalars_in_mean(share)
    _average_over_all(share)


def _install_in_3(share: Share, module: Any) -> None:
    tf = require_tensorflow()
    _leave_losses_alone(share, module, "scale_loss_for_distribution")
    _leave_losses_alone(share, module, "unscale_loss_for_distribution")
    _tell_losses_of_compile(share, keras_names.source_module("trainers.compile_utils").CompileLoss)
    _leave_stand_ins_out(share, keras_names.source_module("backend.tensorflow.nn"))
    if keras_version() < (3, 14):
        _sum_activities(share)
    stock_mask, stock_reduce = module.apply_mask, module.reduce_values

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        if share.current is None or mask is None or reduction not in _MEANS_OF_3:
            return stock_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
        weights = stock_mask(sample_weight, mask, dtype=dtype, reduction="sum")
        rows, valid = _counts(share, mask)
        return weights * tf.cast(tf.math.divide_no_nan(rows, valid), weights.dtype)

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
    ) -> Any:
        if share.of_compile and share.current is not None:
            values = _widened(values)
        result = stock_reduce(values, sample_weight, reduction)
        if share.current is None or values.shape.rank == 0:
            return result
        if reduction == "sum" or (reduction in ("none", None) and share.of_compile):
            return share.undone(result)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            total = share.total(tf.cast(tf.reduce_sum(sample_weight), values.dtype))
            return share.undone(tf.math.divide_no_nan(tf.reduce_sum(values), total))
        return result

    module.apply_mask, module.reduce_values = apply_mask, reduce_values


def _install_in_2(share: Share, module: Any) -> None:
    tf = require_tensorflow()
    _leave_losses_alone(share, module, "scale_loss_for_distribution")
    _tell_losses_of_compile(
        share, keras_names.source_module("engine.compile_utils").LossesContainer
    )
    _allow_means(share, tf.keras.losses.Loss)
    _leave_stand_ins_out_in_2(share)
    stock_mask, stock_reduce = module.apply_valid_mask, module.reduce_weighted_loss
    reductions = tf.keras.losses.Reduction

    def apply_valid_mask(losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
        if share.current is None or mask is None or reduction == reductions.SUM:
            return stock_mask(losses, sw, mask, reduction)
        weights = module.apply_mask(losses, sw, tf.cast(mask, losses.dtype))
        if reduction == reductions.NONE:
            return weights
        rows, valid = _counts(share, mask)
        return weights * tf.cast(rows / valid, weights.dtype)

    def reduce_weighted_loss(
        weighted_losses: Any, reduction: Any = reductions.SUM_OVER_BATCH_SIZE
    ) -> Any:
        if share.of_compile and share.current is not None:
            weighted_losses = _widened(weighted_losses)
        result = stock_reduce(weighted_losses, reduction)
        of_scalar = weighted_losses.shape.rank == 0
        if share.current is None or of_scalar or reduction == reductions.SUM_OVER_BATCH_SIZE:
            return result
        if reduction == reductions.NONE and not share.of_compile:
            return result
        return share.undone(result)

    module.apply_valid_mask = apply_valid_mask
    module.reduce_weighted_loss = reduce_weighted_loss


def _sum_activities(share: Share) -> None:
    """Makes activity regularizers sums over the batch, which Keras 3 divides by it from 3.14 on."""
    name = "activity_regularizer"

    def get(self: Any) -> Any:
        if name not in vars(self):
            raise AttributeError(name)
        regularizer = vars(self)[name]
        if share.current is None or regularizer is None:
            return regularizer
        return lambda output: share.undone(regularizer(output))

    def set_(self: Any, regularizer: Any) -> None:
        vars(self)[name] = regularizer

    setattr(require_tensorflow().keras.layers.Layer, name, property(get, set_))


def _leave_losses_alone(share: Share, module: Any, name: str) -> None:
    """Takes the strategy's 1/N away where nanotf weighs by shares, and where nobody sums.

    In a loop outside of steps every worker computes the whole.
    """
    tf = require_tensorflow()
    stock = getattr(module, name)

    def scaled(value: Any) -> Any:
        whole = share.in_loop and tf.distribute.in_cross_replica_context()
        return value if whole or share.current is not None else stock(value)

    setattr(module, name, scaled)


def _tell_losses_of_compile(share: Share, container: Any) -> None:
    """Sets `share.of_compile` while a model's container of losses computes, and notes that it does.

    See `keras_names.unused_losses`.
    """
    container._nanotf_called = False
    stock = container.__call__

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, share.of_compile = share.of_compile, True
        if not is_keras_3():
            self._nanotf_called = True
        try:
            return stock(self, *args, **kwargs)
        finally:
            share.of_compile = before

    container.__call__ = call


def _allow_means(share: Share, loss: Any) -> None:
    """Lets losses that the user's own step calls be means, as in one process."""
    stock = loss._get_reduction

    def get_reduction(self: Any) -> Any:
        if share.current is None or self._allow_sum_over_batch_size:
            return stock(self)
        self._allow_sum_over_batch_size = True
        try:
            return stock(self)
        finally:
            self._allow_sum_over_batch_size = False

    loss._get_reduction = get_reduction


def _leave_stand_ins_out(share: Share, module: Any) -> None:
    """Keeps rows that stand in for none out of the statistics that all workers share."""
    stock = module._compute_moments_sync

    def compute_moments_sync(x: Any, axes: Any, keepdims: Any) -> Any:
        return stock(_rows_that_count(x, share), axes, keepdims)

    module._compute_moments_sync = compute_moments_sync


def _leave_stand_ins_out_in_2(share: Share) -> None:
    path = "layers.normalization.batch_normalization"
    cls = keras_names.source_module(path).BatchNormalizationBase
    stock = cls._sync_calculate_mean_and_var

    def calculate(self: Any, x: Any, axes: Any, keep_dims: Any, mask: Any = None) -> Any:
        mask = None if mask is None else _rows_that_count(mask, share)
        return stock(self, _rows_that_count(x, share), axes, keep_dims, mask=mask)

    cls._sync_calculate_mean_and_var = calculate


def _rows_that_count(value: Any, share: Share) -> Any:
    """The rows of a tensor, or none where they stand in for none."""
    tf = require_tensorflow()
    if share.current is None:
        return value
    rows = tf.cond(share.current > 0, lambda: value, lambda: value[:0])
    rows.set_shape([None, *value.shape[1:]])
    return rows


def _average_over_all(share: Share) -> None:
    """Makes TensorFlow's helpers for own steps right where replicas have unequal shares.

    They divide by the number of replicas, which is left out: the share takes its place.
    """
    tf = require_tensorflow()
    stock_average, stock_scale = tf.nn.compute_average_loss, tf.nn.scale_regularization_loss

    def undivided(value: Any) -> Any:
        return value * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, value.dtype)

    @functools.wraps(stock_average)
    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        average = stock_average(per_example_loss, sample_weight, global_batch_size)
        if share.current is None:
            return average
        return undivided(average) if global_batch_size is None else share.undone(average)

    @functools.wraps(stock_scale)
    def scale_regularization_loss(regularization_loss: Any) -> Any:
        scaled = stock_scale(regularization_loss)
        return scaled if share.current is None else undivided(scaled)

    for stock, ours in (
        (stock_average, compute_average_loss),
        (stock_scale, scale_regularization_loss),
    ):
        # Functions that travel by value find it where it was defined.
        for module in (tf.nn, sys.modules[stock.__module__]):
            setattr(module, stock.__name__, ours)


def _counts(share: Share, mask: Any) -> tuple[Any, Any]:
    """The entries of a mask and those that are valid, over all workers, in float64."""
    tf = require_tensorflow()
    size = tf.cast(tf.size(mask), tf.float64)
    return share.total(size), share.total(tf.reduce_sum(tf.cast(mask, tf.float64)))


def _weigh_scalars_in_mean(share: Share) -> None:
    mean = require_tensorflow().keras.metrics.Mean
    stock = mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        is_scalar = getattr(getattr(values, "shape", None), "rank", 0) == 0
        if share.current is not None and sample_weight is None and is_scalar:
            sample_weight = share.current
        return stock(self, values, sample_weight=sample_weight)

    mean.update_state = update_state


# ----------------------------------------------------------------- losses and metrics of a model
def follow_share(model: Any, share: Share) -> None:
    """Makes a model's losses and metrics follow the table above.

    Args:
        model: a compiled model, for which `keras_optimizers.build_for_training` was called.
        share: `Share`.
    """
    follow_share_in_metrics(model.metrics, share)
    if is_keras_3():
        losses = model._compile_loss
        for entry in getattr(losses, "_flat_losses", None) or ():
            _take_whole_batch_if_scalar(entry.loss, share)
        trackers = [model._loss_tracker]
        if losses is not None:
            trackers += losses.metrics
    else:
        losses = model.compiled_loss
        if losses is None or not losses.built:
            return
        losses._losses = [_as_mean(loss, share) for loss in losses._losses]
        trackers = [losses._total_loss_mean, *losses._per_output_metrics]
    for tracker in trackers:
        if tracker is not None:
            _count_values_of_all(tracker, share)


def follow_share_in_metrics(metrics: list[Any], share: Share) -> bool:
    """Same, of metrics alone: those of a model or of a loop.

    Returns:
        Whether any did not follow it before.
    """
    has_changed = False
    for part in [part for metric in metrics for part in _parts(metric)]:
        if hasattr(part, "_nanotf_follows_share"):
            continue
        function = getattr(part, "_fn", None)
        if takes_whole_batch(part):
            update_with_all_rows(part, share)
        elif function is not None and not is_keras_own(function):
            part._fn = over_whole_batch(function, share, with_gradient=False)
        else:
            continue
        part._nanotf_follows_share = has_changed = True
    return has_changed


def _parts(metric: Any) -> list[Any]:
    """The metrics in one of Keras 3's container of metrics; or the metric."""
    if is_keras_own(type(metric)):
        return list(getattr(metric, "metrics", None) or [metric])
    return [metric]


def takes_whole_batch(metric: Any) -> bool:
    """Whether a metric must see the rows of all workers at once.

    The state of Keras's own metrics is a sum over rows, which workers can divide between them,
    but for those that are told to reduce over the batch (`axis=0`). What another class makes of
    its state nobody knows, if it has an `update_state` of its own: a maximum, a count of batches.
    A class says with `nanotf_sums = True` that it is a sum over rows.
    """
    cls: Any = type(metric)
    if getattr(cls, "nanotf_sums", False):
        return False
    if not is_keras_own(_owner_of(cls, "update_state")):
        return True
    options = getattr(metric, "_fn_kwargs", None) or {}
    return is_keras_own(getattr(metric, "_fn", cls)) and options.get("axis", -1) != -1


def _owner_of(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def whole_batch_variables(metrics: list[Any]) -> list[Any]:
    """The variables of those among metrics that take the whole batch: all workers hold them alike.

    Returns:
        A list of `tf.Variable`.
    """
    parts = [part for metric in metrics for part in _parts(metric)]
    return [
        v
        for part in parts
        if takes_whole_batch(part)
        for v in keras_names.variables_of_metric(part)
    ]


def update_with_all_rows(metric: Any, share: Share) -> None:
    """Makes each worker update a metric with the rows of all.

    Args:
        metric: a metric for which `takes_whole_batch` holds.
        share: `Share`.
    """
    stock = metric.update_state

    @functools.wraps(stock)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        if share.current is None or share.has_all_rows:
            return stock(*args, **kwargs)
        tf = require_tensorflow()
        args, kwargs = tf.nest.map_structure(lambda v: _of_all(v, share), (args, kwargs))
        with share.of_all_rows():
            result = stock(*args, **kwargs)
        _hold_alike(metric)  # those that the first update makes, too
        return result

    metric.update_state = update_state
    _hold_alike(metric)


def _hold_alike(metric: Any) -> None:
    """Makes reading a metric's variables give this worker's value, and not a sum."""
    first = require_tensorflow().VariableAggregation.ONLY_FIRST_REPLICA
    for variable in keras_names.variables_of_metric(metric):
        variable._aggregation = first


def _of_all(value: Any, share: Share) -> Any:
    """An argument of an update as a single process would pass it."""
    tf = require_tensorflow()
    if not tf.is_tensor(value) or hasattr(value, "assign") or not isinstance(value, tf.Tensor):
        return value
    if value.shape.rank == 0:
        if not value.dtype.is_floating and not value.dtype.is_integer:
            return value
        counts = share.of(value) if value.dtype.is_floating else _present(value, share)
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, counts)
    if value.dtype == tf.string:
        raise NanoError(
            "A metric that needs the rows of all workers cannot get strings. Received: a tensor of "
            f"shape {value.shape}. If its state is a sum over rows, set nanotf_sums = True on its "
            "class."
        )
    rows = rows_of_all(value, share)
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        rows._keras_mask = rows_of_all(mask, share)
    return rows


def _present(value: Any, share: Share) -> Any:
    tf = require_tensorflow()
    return tf.where(share.current > 0, value, tf.zeros_like(value))


def is_keras_own(value: Any) -> bool:
    """Whether a function or class is Keras's own."""
    module = getattr(value, "__module__", None) or ""
    return module.split(".")[0] in (keras_module_name(), "keras", "tf_keras")


def _take_whole_batch_if_scalar(loss: Any, share: Share) -> None:
    """Replaces `call` of a loss object that the user wrote, or that holds the user's function."""
    if is_keras_own(getattr(loss, "fn", type(loss))):
        return
    loss.call = over_whole_batch(loss.call, share, with_gradient=True)


def _as_mean(loss: Any, share: Share) -> Any:
    """A loss object of Keras 2 that is a mean also to what looks at its `reduction`."""
    if loss is None:
        return None
    _take_whole_batch_if_scalar(loss, share)
    reduction = require_tensorflow().keras.losses.Reduction
    return _Mean(loss) if loss.reduction == reduction.SUM else loss


class _Mean:
    """A loss with reduction SUM. Keras 2 would multiply it by the number of replicas."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.name = loss.name
        self.reduction = require_tensorflow().keras.losses.Reduction.AUTO

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loss(*args, **kwargs)


def _count_values_of_all(tracker: Any, share: Share) -> None:
    """Makes a mean of unreduced losses count the values of all workers.

    Keras gives them the number of the batch's rows as their weight: Keras 3 to their mean,
    Keras 2 to each of them.
    """
    stock = tracker.update_state
    keras_3 = is_keras_3()

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        if share.current is None or sample_weight is None or values.shape.rank == 0:
            return stock(values, sample_weight=sample_weight)
        tf = require_tensorflow()
        rows = tf.cast(sample_weight, values.dtype)
        rows = rows if keras_3 else share.undone(rows)
        return stock(share.of(values), sample_weight=rows)

    tracker.update_state = update_state


def follow_results(metrics: list[Any], share: Share) -> None:
    """Makes results of metrics, in a step, follow `share.whole_results`."""
    for metric in metrics:
        if not hasattr(metric.result, "_nanotf_follows"):
            metric.result = _following(metric, metric.result, share)


def _following(metric: Any, stock: Any, share: Share) -> Callable[..., Any]:
    """The method `result` of a metric."""

    @functools.wraps(stock)
    def result(*args: Any, **kwargs: Any) -> Any:
        tf = require_tensorflow()
        if share.current is None:
            return stock(*args, **kwargs)
        share.has_results = True
        if not share.whole_results:
            return stock(*args, **kwargs)
        on_read = tf.VariableSynchronization.ON_READ
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA  # all have the same
        variables = [keras_names.tf_variable(v) for v in metric.variables]
        variables = [
            v for v in variables if v.synchronization == on_read and v.aggregation != first
        ]
        own = [variable.read_value() for variable in variables]
        whole = [share.counted(variable) for variable in variables]
        if is_keras_3():  # Keras 2 sums them in `stock`
            whole = _combined(variables, whole)
        share.whole_results = False  # for metrics inside of this one
        try:
            _assign(variables, whole)
            return tf.nest.map_structure(_read, stock(*args, **kwargs))
        finally:
            _assign(variables, own)
            share.whole_results = True

    result._nanotf_follows = True  # type: ignore[attr-defined]
    return result


def _combined(variables: list[Any], values: list[Any]) -> list[Any]:
    """The values that variables of this rank have when they are read outside of steps."""
    tf = require_tensorflow()
    context = tf.distribute.get_replica_context()
    combined = list(values)
    for dtype in {value.dtype: None for value in values}:
        places = [place for place, value in enumerate(values) if value.dtype == dtype]
        parts = [values[place] for place in places]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
        for place, total in zip(places, sums, strict=True):
            mean = variables[place].aggregation == tf.VariableAggregation.MEAN
            combined[place] = total / context.num_replicas_in_sync if mean else total
    return combined


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _read(value: Any) -> Any:
    """A result that no later assignment changes."""
    tf = require_tensorflow()
    return tf.identity(value) if tf.is_tensor(value) or hasattr(value, "assign") else value


def over_whole_batch(
    function: Callable[..., Any], share: Share, with_gradient: bool
) -> Callable[..., Any]:
    """Makes a function of rows that returns a scalar see those of all workers.

    The scalar may be anything, a ratio of sums among them, which is not to be had of the
    scalars of the parts. A function that returns a value for each row is left alone.

    Args:
        function: of targets and predictions, or of other tensors. Those with as many rows as the
            first are rows of the batch.
        share: `Share`.
        with_gradient: bool, whether the scalar is a loss.
    """
    tf = require_tensorflow()

    def call(*args: Any, **kwargs: Any) -> Any:
        values = function(*args, **kwargs)
        if share.current is None or getattr(values, "shape", tf.TensorShape([])).rank != 0:
            return values
        given = tf.nest.flatten((args, kwargs))
        rows = [_rows(leaf) for leaf in given]
        if not any(rows):
            return values
        first = next(filter(None, rows))
        whole_batch = [
            rows_of_all(tf.convert_to_tensor(leaf), share) if found == first else leaf
            for leaf, found in zip(given, rows)  # noqa: B905 - AutoGraph lacks `strict`
        ]
        whole_args, whole_kwargs = tf.nest.pack_sequence_as((args, kwargs), whole_batch)
        whole = function(*whole_args, **whole_kwargs)
        if not with_gradient:
            return whole
        # Every worker has the whole loss, but the gradient of its own rows only, which must
        # come out whole when it is multiplied by the share.
        gradient = whole - tf.stop_gradient(whole)
        return tf.stop_gradient(whole) + share.undone(gradient)

    return call


def _rows(leaf: Any) -> tuple[Any, ...]:
    """How many rows a tensor or array has, as a tuple: None where tracing does not know it.

    Empty for what has none.
    """
    tf = require_tensorflow()
    is_array = isinstance(leaf, tf.Tensor) or hasattr(leaf, "__array_interface__")
    if not is_array or getattr(leaf.shape, "rank", 0) is None:
        return ()
    return tuple(leaf.shape[:1])


def rows_of_all(value: Any, share: Share) -> Any:
    """The rows of all workers in their order; a gradient reaches the worker's own alone."""
    tf = require_tensorflow()
    context = tf.distribute.get_replica_context()
    own = tf.cond(share.current > 0, lambda: value, lambda: value[:0])
    if own.dtype == tf.string:
        whole = _strings_of_all(own, context)
        whole.set_shape([None, *value.shape[1:]])
        return whole
    sent = tf.stop_gradient(tf.cast(own, tf.int32) if own.dtype == tf.bool else own)
    rows = tf.cast(context.all_gather(sent, axis=0), own.dtype)
    counts = context.all_gather(tf.shape(own)[:1], axis=0)
    rank = context.replica_id_in_sync_group
    first = tf.reduce_sum(counts[:rank])
    whole = tf.concat([rows[:first], own, rows[first + counts[rank] :]], axis=0)
    whole.set_shape([None, *value.shape[1:]])
    return whole


def _strings_of_all(own: Any, context: Any) -> Any:
    """The rows of all workers of a tensor of strings: they are sent as bytes, and their lengths.

    Each goes with a byte before it, since TensorFlow gathers no tensor that is empty everywhere.
    """
    tf = require_tensorflow()
    texts = tf.strings.join([" ", tf.reshape(own, [-1])])
    codes = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
    lengths = context.all_gather(tf.strings.length(texts), axis=0)
    codes = context.all_gather(tf.cast(codes, tf.int32), axis=0)
    characters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), codes)
    ragged = tf.RaggedTensor.from_row_lengths(characters, lengths, validate=False)
    joined = tf.strings.reduce_join(ragged, axis=-1)
    whole = tf.strings.substr(joined, tf.ones_like(lengths), lengths - 1)
    return tf.reshape(whole, tf.concat([[-1], tf.shape(own)[1:]], axis=0))


# ------------------------------------------------------------------------------- gradients
