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
from nanotf.sagemaker.smp.microbatch_passes import Line, MicrobatchPass
from nanotf.sagemaker.smp.times import StepTimes

_steps = itertools.count()  # all partitions trace the same steps in the same order


def run(function: Callable[..., Any], parts: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Traces a step.

    Args:
        function: the user's.
        parts: the positional and the keyword arguments of each microbatch.

    Returns:
        The result of `function`, for each microbatch.

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
    line, passes = Line(StepTimes(runtime.current())), {}
    numbers = [leaf for leaf in tf.nest.flatten(list(parts)) if _is_of_numbers(leaf)]
    watch = advice.SpeedComparison(f"step{number}", line.times, exchange.gather_now)
    line.last = [exchange.begin(f"step{number}.data", numbers, watch.begins)]
    try:
        for action in schedule.actions(runtime.current(), runtime.mp_rank()):
            body = found[action.microbatch]
            if action.kind is schedule.Half.FORWARD:
                call = body.start()
                if call is not None:
                    line.times.models.add(call.model)
                    with step_seeds.drawing_from(body.seeds):
                        made = _MicrobatchCall(call, line, f"step{number}", action.microbatch)
                    passes[action.microbatch] = made
            elif action.microbatch in passes:
                _continue(body, passes[action.microbatch], f"step{number}.{action.microbatch}")
    finally:  # after an error, threads still wait for the results of the model
        for body in found:
            body.stop()
    for model in line.times.models:
        partitioned.begun(model).check_reads(v for body in found for v in body.reads.variables)
    # First what all partitions have: those without trainable variables see no gradients.
    seen = {
        f"{what} of microbatch {microbatch}": tensors
        for place in (0, 1)
        for microbatch, made in sorted(passes.items())
        for what, tensors in list(made.of_stage.seen.items())[place : place + 1]
    }
    with tf.control_dependencies([exchange.compare(f"step{number}.seen", seen)]):
        return [_tensors(body.result) for body in found]


def call(model: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Returns the results of a model that is called in a step's function.

    Args:
        model: a `StepModel`.
        whole: calls the model uncut.
        args, kwargs: those of the call.
    """
    return bodies.current().call(bodies.BodyCall(model, whole, args, kwargs))


class _MicrobatchCall:
    """A call of the model in a microbatch, begun when it is made."""

    def __init__(self, request: bodies.BodyCall, line: Line, step: str, microbatch: int) -> None:
        known = partitioned.begun(request.model)
        cut, self._inputs = known.cut(request)
        self._structure = cut.structure
        self.flow = known.flow
        self.of_stage = MicrobatchPass(cut, known.trainable, self.flow, line, step, microbatch)
        self.of_stage.forward(self._inputs)

    def answer(self) -> Callable[[], Any]:
        """Makes the operations for the results; returns a function that the body calls for them."""
        results = self.of_stage.results()

        def joined() -> Any:
            flat = self.of_stage.joined(self._inputs, results)
            return tf.nest.pack_sequence_as(self._structure, flat, expand_composites=True)

        return joined


def _continue(body: bodies.Body, made: _MicrobatchCall, tag: str) -> None:
    again = body.resume(made.answer())
    if again is not None:
        raise UnavailableError(
            "A step with several partitions calls one model once. Received: a further call, of "
            f"{again.model.name!r}. Call all parts in one smp.DistributedModel."
        )
    asked = exchange.known_everywhere(f"{tag}.asked", int(made.of_stage.has_gradients))
    counts = {partition: asked[partition] for partition in made.flow.asking}
    if len(set(counts.values())) > 1:
        without = min(counts, key=lambda partition: counts[partition])
        raise ModelError(
            "All partitions must compute gradients in a step, or none. Received: partition "
            f"{without} computes {counts[without]}, partition {max(counts, key=counts.__getitem__)}"
            f" {max(counts.values())}. Call tape.gradient or smp.gradients on all of them."
        )
    if any(counts.values()) and runtime.mp_rank() in made.flow.passive:
        made.of_stage.backward_for_others()


def _is_of_numbers(leaf: Any) -> bool:
    kinds = (tf.string, tf.resource, tf.variant)
    return isinstance(leaf, tf.Tensor) and leaf.dtype not in kinds


def _tensors(result: Any) -> Any:
    """Reads variables and converts numbers among results, as the end of a `tf.function` does."""
    return tf.nest.map_structure(
        lambda value: None if value is None else tf.identity(value), result
    )
