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
since that costs nothing. Where the user's runs it is the gradients (`region.gradients`), since
nobody knows how the loss came about.

The functions that take a stock attribute and a worker are replacements, see `overrides`. Metrics
are in `metrics`. The private names of both generations that this takes beside those of that table:

| name | generation, versions seen | why |
| --- | --- | --- |
| `utils.losses_utils.apply_mask` | 2; 2.15, tf_keras 2.15-2.21 | masked means, sums |
| `Loss._allow_sum_over_batch_size` | 2; 2.15, tf_keras 2.15-2.21 | see `get_reduction` |
| `LossFunctionWrapper.fn` | 2 and 3 | the function in it |
"""

from __future__ import annotations

import functools
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ModelError
from nanotf.region import metrics
from nanotf.region.share import Share, Worker, over_whole_batch, widened

_MEANS_OF_3 = ("mean", "sum_over_batch_size")


def apply_mask_in_3(stock: Any, worker: Worker) -> Any:
    """Makes the counts of a masked mean those of all workers."""
    tf, share = require_tensorflow(), worker.share

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        if share.current is None or mask is None or reduction not in _MEANS_OF_3:
            return stock(sample_weight, mask, dtype=dtype, reduction=reduction)
        weights = stock(sample_weight, mask, dtype=dtype, reduction="sum")
        rows, valid = _counts(share, mask)
        return weights * tf.cast(tf.math.divide_no_nan(rows, valid), weights.dtype)

    return apply_mask


def apply_mask_in_2(stock: Any, worker: Worker) -> Any:
    """Same, of Keras 2's `apply_valid_mask`."""
    tf, share = require_tensorflow(), worker.share
    module = keras_names.source_module("utils.losses_utils")
    reductions = tf.keras.losses.Reduction

    def apply_valid_mask(losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
        if share.current is None or mask is None or reduction == reductions.SUM:
            return stock(losses, sw, mask, reduction)
        weights = module.apply_mask(losses, sw, tf.cast(mask, losses.dtype))
        if reduction == reductions.NONE:
            return weights
        rows, valid = _counts(share, mask)
        return weights * tf.cast(rows / valid, weights.dtype)

    return apply_valid_mask


def reduce_in_3(stock: Any, worker: Worker) -> Any:
    """Makes a reduction to something else than a mean one that the share makes right."""
    tf, share = require_tensorflow(), worker.share

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
    ) -> Any:
        if share.of_compile and share.current is not None:
            values = widened(values)
        result = stock(values, sample_weight, reduction)
        if share.current is None or values.shape.rank == 0:
            return result
        if reduction == "sum" or (reduction in ("none", None) and share.of_compile):
            return share.undone(result)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            total = share.total(tf.cast(tf.reduce_sum(sample_weight), values.dtype))
            return share.undone(tf.math.divide_no_nan(tf.reduce_sum(values), total))
        return result

    return reduce_values


def reduce_in_2(stock: Any, worker: Worker) -> Any:
    """Same, of Keras 2's `reduce_weighted_loss`."""
    share, reductions = worker.share, require_tensorflow().keras.losses.Reduction

    def reduce_weighted_loss(
        weighted_losses: Any, reduction: Any = reductions.SUM_OVER_BATCH_SIZE
    ) -> Any:
        if share.of_compile and share.current is not None:
            weighted_losses = widened(weighted_losses)
        result = stock(weighted_losses, reduction)
        of_scalar = weighted_losses.shape.rank == 0
        if share.current is None or of_scalar or reduction == reductions.SUM_OVER_BATCH_SIZE:
            return result
        if reduction == reductions.NONE and not share.of_compile:
            return result
        return share.undone(result)

    return reduce_weighted_loss


def activity_regularizer(stock: None, worker: Worker) -> property:
    """Makes activity regularizers sums over the batch, which Keras 3 divides by it from 3.14 on."""
    share, name = worker.share, "activity_regularizer"

    def get(self: Any) -> Any:
        if name not in vars(self):
            raise AttributeError(name)
        regularizer = vars(self)[name]
        if share.current is None or regularizer is None:
            return regularizer
        return lambda output: share.undone(regularizer(output))

    def set_(self: Any, regularizer: Any) -> None:
        vars(self)[name] = regularizer

    return property(get, set_)


def scale_loss(stock: Any, worker: Worker) -> Any:
    """Takes the strategy's 1/N away where nanotf weighs by shares."""
    share = worker.share

    def scaled(value: Any, /) -> Any:
        return stock(value) if share.current is None else value

    return scaled


def compute_losses_of_compile(stock: Any, worker: Worker) -> Any:
    """Sets `share.of_compile` while a model's container of losses computes, and notes that it does.

    See `Generation.unused_losses`.
    """
    share = worker.share

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, share.of_compile = share.of_compile, True
        if generation().LISTS_UNUSED_LOSSES:
            self._nanotf_called = True
        try:
            return stock(self, *args, **kwargs)
        finally:
            share.of_compile = before

    return call


def get_reduction(stock: Any, worker: Worker) -> Any:
    """Lets losses that the user's own step calls be means, as in one process."""
    share = worker.share

    def get_reduction(self: Any) -> Any:
        if share.current is None or self._allow_sum_over_batch_size:
            return stock(self)
        self._allow_sum_over_batch_size = True
        try:
            return stock(self)
        finally:
            self._allow_sum_over_batch_size = False

    return get_reduction


def compute_moments_sync(stock: Any, worker: Worker) -> Any:
    """Keeps rows that stand in for none out of the statistics that all workers share."""

    def compute(x: Any, axes: Any, keepdims: Any) -> Any:
        return stock(_rows_that_count(x, worker.share), axes, keepdims)

    return compute


def compute_moments_sync_in_2(stock: Any, worker: Worker) -> Any:
    """Same, in Keras 2."""

    def calculate(self: Any, x: Any, reduction_axes: Any, keep_dims: Any, mask: Any = None) -> Any:
        mask = None if mask is None else _rows_that_count(mask, worker.share)
        return stock(self, _rows_that_count(x, worker.share), reduction_axes, keep_dims, mask=mask)

    return calculate


def _rows_that_count(value: Any, share: Share) -> Any:
    """The rows of a tensor, or none where they stand in for none."""
    tf = require_tensorflow()
    if share.current is None:
        return value
    rows = tf.cond(share.current > 0, lambda: value, lambda: value[:0])
    rows.set_shape([None, *value.shape[1:]])
    return rows


def average_loss(stock: Any, worker: Worker) -> Any:
    """Makes `tf.nn.compute_average_loss` right where replicas have unequal shares.

    It divides by the number of replicas, which is left out: the share takes its place.
    """
    share = worker.share

    @functools.wraps(stock)
    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        average = stock(per_example_loss, sample_weight, global_batch_size)
        if share.current is None:
            return average
        return _undivided(average) if global_batch_size is None else share.undone(average)

    return compute_average_loss


def scale_regularization(stock: Any, worker: Worker) -> Any:
    """Same, of `tf.nn.scale_regularization_loss`."""

    @functools.wraps(stock)
    def scale_regularization_loss(regularization_loss: Any) -> Any:
        scaled = stock(regularization_loss)
        return scaled if worker.share.current is None else _undivided(scaled)

    return scale_regularization_loss


def _undivided(value: Any) -> Any:
    tf = require_tensorflow()
    return value * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, value.dtype)


def _counts(share: Share, mask: Any) -> tuple[Any, Any]:
    """The entries of a mask and those that are valid, over all workers, in float64."""
    tf = require_tensorflow()
    size = tf.cast(tf.size(mask), tf.float64)
    return share.total(size), share.total(tf.reduce_sum(tf.cast(mask, tf.float64)))


def follow_share(model: Any, share: Share) -> None:
    """Makes a model's losses and metrics follow the table above.

    Args:
        model: a compiled model, for which `keras_optimizers.build_for_training` was called.
        share: `Share`.
    """
    metrics.follow_share(model.metrics, share)
    generation().replace_losses(model, functools.partial(_following, share=share))
    for tracker in generation().loss_trackers(model):
        _count_values_of_all(tracker, share)


def _take_whole_batch_if_scalar(loss: Any, share: Share) -> None:
    """Replaces `call` of a loss object that the user wrote; Keras's own do it by themselves."""
    if not keras_names.is_keras_own(type(loss)):
        loss.call = over_whole_batch(loss.call, share, with_gradient=True)


def call_function(stock: Any, worker: Worker) -> Any:
    """Makes losses that hold a function see the rows of all workers where it needs them.

    Those of Keras's own do, and any function that `compile` is given. Of Keras's own functions
    some are one ratio for the batch (Dice, Tversky), and all are one number of outputs of one
    dimension.
    """
    share = worker.share

    @functools.wraps(stock)
    def call(self: Any, y_true: Any, y_pred: Any) -> Any:
        sees_all = share.current is None or share.has_all_rows
        if sees_all or keras_names.is_mean_over_rows(self.fn):
            return stock(self, y_true, y_pred)
        if keras_names.is_keras_own(self.fn) and self.fn.__name__ == "circle":
            raise ModelError(
                "Workers share the rows of a batch, and a loss that compares each row with all "
                "others needs them in one process. Received: the loss Circle. Leave num_processes "
                "out, or write the loss as a function that returns one number for the batch."
            )
        of_rows = functools.partial(stock, self)
        return over_whole_batch(of_rows, share, with_gradient=True)(y_true, y_pred)

    return call


def _following(loss: Any, share: Share) -> Any:
    """A loss object of `compile`, or what takes its place: a mean also where its sum is scaled."""
    _take_whole_batch_if_scalar(loss, share)
    if not generation().SCALES_SUMS_BY_REPLICAS:
        return loss
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
    each = generation().WEIGHS_EACH_LOSS_BY_ROWS

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        if share.current is None or sample_weight is None or values.shape.rank == 0:
            return stock(values, sample_weight=sample_weight)
        tf = require_tensorflow()
        rows = tf.cast(sample_weight, values.dtype)
        rows = share.undone(rows) if each else rows
        return stock(share.of(values), sample_weight=rows)

    tracker.update_state = update_state
