"""Runs `fit(num_processes=...)` in the parent, and starts it again after workers died."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, UndividedError, WorkerDied, WorkerStuck
from nanotf.parent import calls, gpu, rejections
from nanotf.parent.fit.fit_call import FitCall
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.reading.fit_data import takes_unlike_rows
from nanotf.parent.resume.resumption import finished
from nanotf.pool import warm
from nanotf.pool.plans import AnyPlan
from nanotf.pool.transports import check_transport
from nanotf.shipping.data.pipelines import check_sharding


def fit(
    model: Any,
    given: Mapping[str, Any],
    num_processes: int,
    transport: str | None = None,
    cores_per_process: int | None = None,
    sharding: str | None = None,
    max_restarts: int = 0,
    cores: Sequence[int] | None = None,
    backend: str | None = None,
    resume: Any = None,
    avoid: Collection[int] = (),
    alone: Callable[[Any], Any] | None = None,
) -> Any:
    """Trains a model on `num_processes` workers.

    Args:
        model: a compiled Keras model.
        given: mapping of str to object, the arguments of Keras's `fit` that were given.
        num_processes: int, above 1.
        transport: str or None for the default, one of `transports.TRANSPORTS`.
        cores_per_process: int or None for equal shares of all usable cores.
        sharding: str or None for "auto", one of `shipping.data.pipelines.SHARDINGS`.
        max_restarts: int, how often training continues, from the last completed epoch and with new
            workers, after a worker died or got stuck.
        cores: sequence of int or None, the logical CPUs to share out between the workers.
        backend: str or None for the default, one of `backends.BACKENDS`.
        resume: path or None, see `Resumption`.
        avoid: collection of int, the logical CPUs of this process's readers.
        alone: callable or None, takes `given` and trains in this process; called, with a line that
            says why, instead of raising `UndividedError`.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError, PlacementError, ModelError,
        ShippingError: An argument cannot be used. No process was started.
        WorkerError: A worker raised or died.
    """
    plan = calls.plan_for("fit", num_processes, cores_per_process, cores, backend, avoid)
    _check_steps_per_execution(model, check_transport(transport))
    sharding = check_sharding(sharding)
    if plan is None and resume is not None:
        raise InvalidArgumentError(
            "With GPUs, `resume` works in one process. Received: "
            f"num_processes={num_processes} and {len(gpu.devices())} GPU(s). Leave num_processes "
            "out."
        )
    again = given
    if alone is not None:
        given, again = _kept(given)
    try:
        is_dataset = isinstance(given.get("x"), require_tensorflow().data.Dataset)
        if alone is not None and is_dataset and not takes_unlike_rows(model, sharding):
            rejections.check_first_batch(given["x"])
        arguments = FitArguments.of(given)
        call = FitCall(model, arguments, num_processes, sharding, max_restarts, resume)
    except UndividedError as error:
        if alone is None:
            raise
        warn_undivided(error)
        return alone(again)
    del again  # it would hold all that is read from now on
    if call.is_finished:
        return finished(call)
    if plan is None:
        return gpu.fit(call, given, num_processes, gpu.devices())
    with call.watching(), generation().untraced_hidden(model):
        return _run(call, plan, transport)


def warn_undivided(error: UndividedError) -> None:
    """Says why a `fit` of an unchanged script runs in one process."""
    logger.warning("fit() trains in one process, since it cannot be divided. %s", error)


def _kept(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns arguments twice, since Keras reads the beginning of a generator before it trains."""
    if not isinstance(given.get("x"), types.GeneratorType):
        return given, given
    first, second = itertools.tee(given["x"])
    return {**given, "x": (x for x in first)}, {**given, "x": (x for x in second)}


def _run(call: FitCall, plan: AnyPlan, transport: str | None) -> Any:
    while True:
        try:
            with warm.pool_for(plan, check_transport(transport)) as workers:
                return call.run(workers)
        except (WorkerDied, WorkerStuck) as error:
            if call.has_ended:  # the training itself is complete
                logger.warning("After the end of training: %s", error.message)
                return call.finish([], ())
            call.prepare_restart(error)


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
