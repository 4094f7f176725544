"""Runs `fit(num_processes=...)` in the parent, and starts it again after workers died."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, UndividedError
from nanotf.parent import gpu, rejections
from nanotf.parent.fit.fit_call import FitCall
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.reading.fit_data import takes_unlike_rows
from nanotf.parent.resume.resumption import finished
from nanotf.parent.where import Where


def fit(
    keras_call: KerasCall,
    where: Where,
    options: FitOptions,
    alone: Callable[[KerasCall], Any] | None = None,
) -> Any:
    """Trains a model on several workers.

    Args:
        keras_call: the call of Keras's `fit`, of a compiled model; its arguments are known by name.
        where: the place of the workers, at least two.
        options: checked.
        alone: trains in this process; called, after a line that says why, instead of raising
            `UndividedError`. None raises it.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError, PlacementError, ModelError,
        ShippingError: An argument cannot be used. No process was started.
        WorkerError: A worker raised or died.
    """
    model, given = keras_call.model, keras_call.given
    assert given is not None
    plan = where.plan("fit")
    keras_call.warn_of_bypass()
    _check_steps_per_execution(model, where.transport)
    if plan is None and options.resume is not None:
        raise InvalidArgumentError(
            "With GPUs, `resume` works in one process. Received: "
            f"num_processes={where.size} and {len(gpu.devices())} GPU(s). Leave num_processes "
            "out."
        )
    again = given
    if alone is not None:
        given, again = _kept(given)
    try:
        is_dataset = isinstance(given.get("x"), require_tensorflow().data.Dataset)
        if alone is not None and is_dataset and not takes_unlike_rows(model, options.sharding):
            rejections.check_first_batch(given["x"])
        call = FitCall(model, FitArguments.of(given), where.size, options)
    except UndividedError as error:
        if alone is None:
            raise
        warn_undivided(error)
        return alone(keras_call.with_arguments(again))
    del again, keras_call  # they would hold all that a generator yields from now on
    if call.is_finished:
        return finished(call)
    if plan is None:
        return gpu.fit(call, given, where.size, gpu.devices())
    with call.watching(), generation().untraced_hidden(model):
        return call.run_on(where, plan)


def warn_undivided(error: UndividedError) -> None:
    """Says why a `fit` of an unchanged script runs in one process."""
    logger.warning("fit() trains in one process, since it cannot be divided. %s", error)


def _kept(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns arguments twice, since Keras reads the beginning of a generator before it trains."""
    if not isinstance(given.get("x"), types.GeneratorType):
        return given, given
    first, second = itertools.tee(given["x"])
    # Generators again: Keras 3 knows them by their class, and refuses other iterators.
    return {**given, "x": (x for x in first)}, {**given, "x": (x for x in second)}


def _check_steps_per_execution(model: Any, transport: str) -> None:
    """Rejects arguments for which TensorFlow's collectives would get no keys in a graph."""
    if transport == "grpc" and generation().is_compiled(model):
        steps = int(model.steps_per_execution) if generation().steps_at_once(model) > 1 else 1
        if steps > 1:
            raise InvalidArgumentError(
                "TensorFlow's collectives do not work inside the loop that makes several steps one "
                f"execution. Received: transport='grpc' and steps_per_execution={steps}. Use "
                "transport='shm', or compile(steps_per_execution=1)."
            )
