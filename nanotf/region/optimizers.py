"""Optimizers in a worker: what they apply is the gradient of the global batch.

Workers sum gradients; where the user's code makes them, the share (`losses`) weighs them before.
`SummedRows` overrides Keras's private methods, which `compat.keras_optimizers` lists.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import distribute, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.region.share import Share, Worker


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
    """Makes an optimizer sum gradients over workers before it looks at them.

    Keras 3 sums them after clipping and accumulating, and after a loss-scaling optimizer has
    looked for infinities, so that each worker would clip its own part of the gradient and
    decide by itself whether to take the step. Keras 2 sums them first.

    Args:
        optimizer: the model's optimizer, in a worker; None does nothing.
    """
    if generation().SUMS_GRADIENTS_FIRST or optimizer is None:
        return
    stock, given = optimizer.apply, optimizer

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        return stock(sum_over_workers(list(grads), given), trainable_variables)

    optimizer.apply = apply
    for each in keras_optimizers.with_inner([optimizer]):
        generation().take_as_summed(each)


# ---------------------------------------------------------------------- weighed by the share
def update_in_branches(optimizer: Any, strategy: Any) -> None:
    """Lets an optimizer update variables inside a branch of `tf.cond`.

    It does so to accumulate gradients, and to overwrite weights with their averages.

    Args:
        optimizer: an optimizer, in a worker.
        strategy: `strategy.WorkerStrategy`.
    """
    if not generation().UPDATES_IN_BRANCHES or not _has_branches(optimizer):
        return
    stock = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        with strategy.without_merging():
            return stock(grads, trainable_variables)

    optimizer.apply = apply


# ------------------------------------------------------------------- replacements, see `overrides`
# All optimizers follow the share in steps of the user's, those that such code makes itself, too:
# so classes are changed.
def stay_summed(stock: Any, worker: Worker) -> Any:
    """Keeps an optimizer of Keras 3 from summing gradients that are summed already."""

    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        return list(grads_and_vars) if worker.share.applying else stock(self, grads_and_vars)

    return _all_reduce_sum_gradients


def follow_share_in_3(stock: Any, worker: Worker) -> Any:
    """Makes `apply` of a class weigh and sum gradients."""
    share, strategy = worker.share, worker.strategy

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
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

    return apply


def follow_share_in_2(stock: Any, worker: Worker) -> Any:
    """Makes `apply_gradients` of a class weigh gradients, which Keras 2 then sums."""
    share, strategy = worker.share, worker.strategy
    options = inspect.signature(stock).parameters

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
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

    return apply_gradients


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
    variables = keras_optimizers.optimizer_variables(optimizer)
    before = [v.aggregation for v in variables]
    for variable in variables:
        distribute.set_aggregation(variable, require_tensorflow().VariableAggregation.NONE)
    try:
        yield
    finally:
        for variable, aggregation in zip(variables, before, strict=True):
            distribute.set_aggregation(variable, aggregation)


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
    """Makes Keras's own `train_step` multiply the loss by the share where it scales it."""
    if optimizer is None or generation().GRADIENT_OF_COMPUTED_LOSS:
        return
    stock = optimizer.scale_loss

    def scale_loss(loss: Any) -> Any:
        return stock(loss if share.current is None else share.of(loss))

    optimizer.scale_loss = scale_loss
