"""Keras's metrics in a worker: their state, and their results, are those of the global batch.

The state of Keras's own metrics is a sum over rows; each worker adds its rows, and a value is the
sum over workers. What need not be such a sum takes the rows of all workers, see `losses`.

The private names of both generations that this takes:

| name | generation, versions seen | why |
| --- | --- | --- |
| `MeanMetricWrapper._fn`, `_fn_kwargs` | 2 and 3 | the user's function in them, and the `axis` that Keras's own reduce over |
| `CompileMetrics.metrics` / `MetricsContainer.metrics` | 3; 3.10-3.15 / 2; 2.15, tf_keras 2.15-2.21 | the metric objects of a model |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nanotf.compat import distribute, keras_names
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import NanoError
from nanotf.region.share import Share, Worker, over_whole_batch, rows_of_all


def follow_share(metrics: list[Any], share: Share) -> bool:
    """Makes metrics, of a model or of a loop, follow the table in `losses`.

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
        elif function is not None and not keras_names.is_mean_over_rows(function):
            part._fn = over_whole_batch(function, share, with_gradient=False)
        else:
            continue
        part._nanotf_follows_share = has_changed = True
    return has_changed


def _parts(metric: Any) -> list[Any]:
    """The metrics in one of Keras 3's container of metrics; or the metric."""
    if keras_names.is_keras_own(type(metric)):
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
    if not keras_names.is_keras_own(_owner_of(cls, "update_state")):
        return True
    options = getattr(metric, "_fn_kwargs", None) or {}
    return keras_names.is_keras_own(getattr(metric, "_fn", cls)) and options.get("axis", -1) != -1


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
        for v in generation().variables_of_metric(part)
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
    for variable in generation().variables_of_metric(metric):
        distribute.set_aggregation(variable, first)


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
        if not generation().SUMS_RESULTS_OF_STEPS:  # otherwise `stock` does
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


# ------------------------------------------------------------------- replacements, see `overrides`
def update_mean(stock: Any, worker: Worker) -> Any:
    """Weighs a scalar handed to the metric `Mean` by the share."""
    tf, share = require_tensorflow(), worker.share

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        rank = getattr(getattr(values, "shape", None), "rank", 0)
        if share.current is not None and sample_weight is None and rank in (0, None):
            sample_weight = share.current
            if rank is None:  # known in the step
                one = tf.ones_like(share.current)
                sample_weight = tf.where(tf.equal(tf.rank(values), 0), share.current, one)
        return stock(self, values, sample_weight=sample_weight)

    return update_state


def leave_alone_while_building(stock: Any, worker: Worker) -> Any:
    """Lets layers of Keras 2 that update a metric in their call be rebuilt under a strategy.

    Building a functional model calls them outside of any replica, where such a metric cannot
    be updated and need not be: its value comes from the parent.
    """
    tf = require_tensorflow()

    def update_state_wrapper(update_state_fn: Any) -> Any:
        updating = stock(update_state_fn)

        def update(metric: Any, *args: Any, **kwargs: Any) -> Any:
            strategy = tf.distribute.get_strategy()
            builds = getattr(strategy.extended, "values_are_known", False)
            if builds and tf.distribute.in_cross_replica_context():
                return None
            return updating(metric, *args, **kwargs)

        return update

    return update_state_wrapper
