"""Traces a step of several partitions, in the order of its schedule.

step (`run`)         actions of this partition in order (`schedule`)
  F of a microbatch  starts the microbatch's body (`bodies`), which runs until it calls the model;
                     makes the stage's operations (`microbatch_passes`), the model being cut
                     in the first call (`partitioned`, `trace`, `cut`)
  B of a microbatch  receives the model's results, and lets the body continue: loss, gradients
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from nanotf.errors import ModelError, UnavailableError
from nanotf.sagemaker.smp import (
    advice,
    bodies,
    exchange,
    partitioned,
    runtime,
    schedule,
    step_seeds,
)
from nanotf.sagemaker.smp.exchange import Line
from nanotf.sagemaker.smp.microbatch_passes import MicrobatchPass
from nanotf.sagemaker.smp.times import StepTimes

_steps = itertools.count()  # all partitions trace the same steps in the same order


def run(function: Callable[..., Any], parts: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Traces a step; returns the function's results for each microbatch.

    Args:
        parts: the positional and the keyword arguments of each microbatch.

    Raises:
        UnavailableError: The function calls a model more than once.
        ModelError: The model cannot be cut, or only some partitions compute gradients.
    """
    graph, number = tf.compat.v1.get_default_graph(), next(_steps)
    base, copy = step_seeds.agreed(f"step{number}"), runtime.dp_rank()
    found = [
        bodies.Body(function, args, kwargs, graph, step_seeds.SeedStream(microbatch, copy, base))
        for microbatch, (args, kwargs) in enumerate(parts)
    ]
    times, results = StepTimes(runtime.current()), list[Any]()
    line, passes = Line(times), dict[int, MicrobatchPass]()
    numbers = [leaf for leaf in tf.nest.flatten(list(parts)) if _is_of_numbers(leaf)]
    watch = advice.SpeedComparison(f"step{number}", times, exchange.gather_now)
    line.begins_with(exchange.begin(f"step{number}.data", numbers, watch.begins))
    try:
        for action in schedule.actions(runtime.current(), runtime.mp_rank()):
            microbatch, body = action.microbatch, found[action.microbatch]
            tag = f"step{number}.{microbatch}"
            if action.kind is schedule.Half.FORWARD:
                call = body.start()
                if call is not None:  # else the function has ended without a model
                    times.models.add(call.model)
                    known = partitioned.begun(call.model)
                    with step_seeds.drawing_from(body.seeds):  # this thread traces the model
                        parts_of_call = *known.cut(call), known.trainable, known.flow
                    made = MicrobatchPass(*parts_of_call, line, tag, microbatch)
                    made.forward()
                    passes[microbatch] = made
            else:
                if microbatch in passes:
                    _continue(body, passes[microbatch], tag)
                results.append(_tensors(body.result))
    finally:  # after an error, threads still wait for the results of the model
        for body in found:
            body.stop()
    for model in times.models:
        partitioned.begun(model).check_reads(v for body in found for v in body.reads.variables)
    # First what all partitions have: those without trainable variables see no gradients.
    seen = {
        f"{what} of microbatch {microbatch}": tensors
        for place in (0, 1)
        for microbatch, made in sorted(passes.items())
        for what, tensors in list(made.seen.items())[place : place + 1]
    }
    exchange.compare(f"step{number}.seen", seen)  # an operation with effects, so it runs
    return results


def call(model: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Returns the results of a model that is called in a step's function; see `BodyCall`."""
    return bodies.current().call(bodies.BodyCall(model, whole, args, kwargs))


def _continue(body: bodies.Body, made: MicrobatchPass, tag: str) -> None:
    again = body.resume(made.answer())
    if again is not None:
        raise UnavailableError(
            "A step with several partitions calls one model once. Received: a further call, of "
            f"{again.model.name!r}. Call all parts in one smp.DistributedModel."
        )
    # Asked while tracing: a step whose partitions differ here would be a deadlock.
    told = made.has_gradients + made.gives_gradients
    asked = exchange.known_everywhere(f"{tag}.asked", told)
    counts = {partition: min(asked[partition], 1) for partition in made.flow.asking}
    if len(set(counts.values())) > 1:
        without = min(counts, key=lambda partition: counts[partition])
        raise ModelError(
            "All partitions must compute gradients in a step, or none. Received: partition "
            f"{without} computes {counts[without]}, partition {max(counts, key=counts.__getitem__)}"
            f" {max(counts.values())}. Call tape.gradient or smp.gradients on all of them."
        )
    if max(asked) == 1:  # an optimizer knows its own partition alone, which may have none
        raise ModelError(
            "A loss must depend on a variable of the model. Received: a loss that gives no "
            "gradients for any variable. Leave tf.stop_gradient out."
        )
    if any(counts.values()) and runtime.mp_rank() in made.flow.passive:
        made.backward_for_others()


def _is_of_numbers(leaf: Any) -> bool:
    # Texts arrive as arrays of objects, whose bytes are addresses.
    kinds = (tf.string, tf.resource, tf.variant)
    return isinstance(leaf, tf.Tensor) and leaf.dtype not in kinds


def _tensors(result: Any) -> Any:
    """Reads variables and converts numbers among results, as the end of a `tf.function` does."""
    return tf.nest.map_structure(
        lambda value: None if value is None else tf.identity(value), result
    )
