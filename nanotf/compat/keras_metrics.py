"""The metrics of a model, of both Keras generations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.keras_common import has_own_step
from nanotf.compat.keras_compiling import kept_random_states, trace_step, without_unused_losses
from nanotf.compat.keras_models import has_call


def build_metrics(model: Any, specs: Any, trace: Callable[[], None] | None = None) -> None:
    """Creates the variables of metrics, which `evaluate` would at its first step.

    Args:
        model: a built and compiled model.
        specs: nested structure of `tf.TensorSpec`, of one batch as `evaluate` sees it.
        trace: function that traces the user's own step, or None if the step is Keras's. It is
            called if the data do not show the model's inputs in that step. Tracing makes the
            metrics that the step uses.
    """
    if not has_call(model):
        return  # its own step builds everything
    with kept_random_states(model):  # one process would make them while it trains
        try:
            generation().build_compiled_metrics(model, specs)
        except Exception:
            if trace is None:
                raise
            trace()


def build_metrics_for(model: Any, step: str, specs: Any) -> None:
    """Creates the variables of metrics that the first step in a single process would create.

    Args:
        model: a built and compiled model.
        step: str, "train_step" or "test_step".
        specs: nested structure of `tf.TensorSpec`, the step's argument.
    """
    if not has_own_step(model, step):
        build_metrics(model, specs)
        return
    trace = functools.partial(trace_step, model, step, specs)
    # A step that runs eagerly may read values, which a trace lacks.
    is_traced = has_call(model) and not model.run_eagerly
    if is_traced and generation().step_builds_losses(model):
        with kept_random_states(model):
            trace()
    build_metrics(model, specs, trace)  # those that the step does not use


def metric_variables(model: Any) -> list[Any]:
    """Returns the variables of a model's built metrics, in a fixed order."""
    return [v for metric in model.metrics for v in generation().variables_of_metric(metric)]


def metric_state(model: Any) -> list[Any]:
    """Returns the variables that a batch hook's logs are computed from, in a fixed order.

    Returns:
        A list of `tf.Variable`: the metrics' variables and the step counters, which Keras 2's
        TensorBoard writes next to them.
    """
    return metric_variables(model) + generation().step_counters(model)


def all_logs(model: Any, logs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the logs of a batch hook, from a model that holds the metrics of all workers.

    Follows Keras's rule for the logs of an epoch: metric results replace what a step returns if
    it has their names. Otherwise the step's result is kept.

    Args:
        model: the user's model.
        logs: dict or None, from rank 0.
    """
    if not logs:
        return logs
    results = without_unused_losses(model, model.get_metrics_result())
    if set(results) != set(logs):
        return logs
    return {name: _number(results[name]) for name in logs}


def _number(value: Any) -> Any:
    """Converts a scalar tensor to a number, as Keras does for callbacks."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.item() if getattr(value, "shape", None) == () else value
