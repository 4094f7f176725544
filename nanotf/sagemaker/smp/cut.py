"""Cuts a traced call into one stage per partition.

1. Every operation gets a partition (`assign`): that of its `smp.partition`, else the default one.
   Operations that depend on the model's inputs and on constants alone are computed wherever they
   are needed, and belong to none.
2. A variable belongs to the earliest partition that uses it. Later ones may read its value, which
   its partition then reads for them; all else that uses it is there.
3. A tensor that leads from one partition to a later one crosses the cut: the earlier stage sends
   it. A tensor that leads to an earlier partition is refused.
4. Edges that order side effects do not cross (their processes share no state), and each stage's
   function is the part of the graph between what it receives and what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from nanotf.compat import graphs
from nanotf.errors import ModelError
from nanotf.sagemaker.smp.trace import TracedCall

EVERYWHERE = None  # the partition of an operation that each stage computes for itself


@dataclass(frozen=True)
class Crossing:
    """A tensor that one stage sends to later ones."""

    tensor: Any  # in the traced graph
    source: int  # the stage that computes it
    consumers: tuple[int, ...]  # the stages that need it, ascending


@dataclass(frozen=True)
class Stage:
    """The part of a call that one partition computes."""

    # Takes the call's inputs and `arrivals`, returns a list of `departures` and then of the call's
    # results at `results`.
    function: Callable[..., Any]
    arrivals: tuple[Crossing, ...]  # received
    departures: tuple[Crossing, ...]  # sent
    results: tuple[int, ...]  # indices of the call's results that the stage computes


@dataclass(frozen=True)
class Cut:
    """A call, cut into stages."""

    stage: Stage  # of this process
    crossings: tuple[Crossing, ...]  # of all stages
    outputs: tuple[Any, ...]  # a `tf.TensorSpec` of each of the call's results
    owners: tuple[int | None, ...]  # the stage that computes each result; None: every stage does
    structure: Any  # the results, for `tf.nest.pack_sequence_as`
    variables: dict[int, int]  # the partition of each variable, by the id of its handle
    written: set[int]  # the ids of the handles of variables that the call writes
    # The indices of the results that depend on a variable, by the id of its handle.
    dependent: dict[int, set[int]]


@dataclass(frozen=True)
class GradientFlow:
    """The partitions through which gradients flow, in calls of one cut.

    A partition whose variables are all frozen computes gradients only for earlier ones. Its own
    code does not ask for any, so the first one that does sends it what it needs.
    """

    asking: tuple[int, ...]  # those with trainable variables: their code asks, all or none
    carrying: tuple[int, ...]  # those that compute gradients, if the asking ones do

    @property
    def passive(self) -> tuple[int, ...]:
        """The partitions that compute gradients only for others."""
        return tuple(n for n in self.carrying if n not in self.asking)


def gradient_flow(cut: Cut, count: int, owners: Collection[int | None]) -> GradientFlow:
    """Returns the partitions through which gradients flow.

    Args:
        count: of partitions.
        owners: of the model's trainable variables.
    """
    # A variable that no call uses is everywhere, so the code of each partition asks.
    asking = tuple(n for n in range(count) if n in owners or EVERYWHERE in owners)
    carrying: list[int] = []
    for number in range(count):  # ascending, since data flows to later ones alone
        sources = {c.source for c in cut.crossings if _flows(c) and number in c.consumers}
        if number in owners or sources & {*carrying}:
            carrying.append(number)
    return GradientFlow(asking, tuple(carrying))


def _flows(crossing: Crossing) -> bool:
    return bool(crossing.tensor.dtype.is_floating)


def cut(traced: TracedCall, partitions: Mapping[str, int | None], stage: int, count: int) -> Cut:
    """Cuts a call.

    Args:
        partitions: the partition of each operation, by its name; see `assign`.
        stage: the partition of this process.
        count: of partitions.

    Raises:
        ModelError: A tensor leads to an earlier partition, a variable belongs to two, a partition
            has no operation, or something else than a tensor of numbers crosses.
    """
    variables = _owners(traced, partitions)
    crossings = _crossings(traced, partitions)
    empty = set(range(count)) - {part for part in partitions.values() if part is not EVERYWHERE}
    if empty:
        raise ModelError(
            "Each partition must compute a part of the model. Received: partitions="
            f"{count}, and the model's call has no operation in partition {min(empty)}. Use "
            "fewer partitions, or smp.partition to assign operations to each."
        )
    owners = tuple(partitions[part.op.name] for part in traced.outputs)
    needed = {crossing.source for crossing in crossings} | {*owners}
    # A result of `EVERYWHERE` is one that each partition computes for the caller.
    if EVERYWHERE not in owners and not needed >= set(range(count)):
        raise ModelError(
            "Each partition must compute what a later one, or the caller, needs. Received: "
            f"partition {min(set(range(count)) - needed)}, which computes neither."
        )
    return Cut(
        stage=_stage(traced, partitions, crossings, owners, stage),
        crossings=tuple(crossings),
        outputs=tuple(tf.TensorSpec(part.shape, part.dtype) for part in traced.outputs),
        owners=owners,
        structure=traced.structure,
        variables=variables,
        written=graphs.written_resources(traced.function.graph),
        dependent=_dependent(traced),
    )


def assign(traced: TracedCall, default: int) -> dict[str, int | None]:
    """Returns the partition of each operation, as the model's call assigns them.

    Args:
        default: for operations outside any `smp.partition`.
    """
    free = everywhere(traced)
    found = {
        op.name: EVERYWHERE if op.name in free else traced.partitions.get(op.name, default)
        for op in traced.operations
    }
    uses: dict[int, list[Any]] = {}  # by variable
    resources = traced.resources()
    for op in traced.operations:
        for part in op.inputs:
            if id(part) in resources:
                uses.setdefault(id(resources[id(part)]), []).append(op)
    for users in uses.values():
        owner = min(part for op in users if (part := found[op.name]) is not EVERYWHERE)
        found.update({op.name: owner for op in users if op.type == "ReadVariableOp"})
    return found


def everywhere(traced: TracedCall) -> set[str]:
    """Returns the names of operations that each stage computes for itself, if it needs them.

    These are the call's inputs, captured resources and constants, and what is computed from inputs
    and constants alone, outside any `smp.partition` and without side effects.
    """
    found: set[str] = set()
    inputs = {part.op.name for part in traced.inputs}
    inputs |= {inner.op.name for _, inner in traced.function.graph.captures}
    resources = traced.resources()
    for op in traced.operations:
        free = all(part.op.name in found and id(part) not in resources for part in op.inputs)
        scoped = op.name in traced.partitions and len(op.inputs) > 0  # a constant stays free
        stateless = not op.op_def.is_stateful and not op.control_inputs
        if op.name in inputs or (free and stateless and not scoped):
            found.add(op.name)
    return found


def _owners(traced: TracedCall, partitions: Mapping[str, int | None]) -> dict[int, int]:
    """Returns the partition of each variable that the call uses, by the id of its handle."""
    resources = traced.resources()
    names = {id(v.handle): v.name for v in traced.function.graph.variables}
    found: dict[int, int] = {}
    for op in traced.operations:
        for part in op.inputs:
            if id(part) not in resources:
                continue
            handle, here = id(resources[id(part)]), partitions[op.name]
            assert here is not EVERYWHERE  # `everywhere` excludes those that take a resource
            if found.setdefault(handle, here) != here:
                raise ModelError(
                    "A variable must be used in one partition, but for reads of its whole value. "
                    f"Received: {names.get(handle, part.name)!r}, used in partitions "
                    f"{found[handle]} and {here} (operation {op.name!r}). Put all uses into one "
                    "smp.partition, or read it by tf.convert_to_tensor(variable) in the later one."
                )
    return found


def _dependent(traced: TracedCall) -> dict[int, set[int]]:
    """Returns the indices of the results whose gradients lead to a variable, by its handle's id."""
    resources, found = traced.resources(), dict[int, set[int]]()
    for place, output in enumerate(traced.outputs):
        seen, left = set[str](), [output]
        while left:
            tensor = left.pop()
            if id(tensor) in resources:
                found.setdefault(id(resources[id(tensor)]), set()).add(place)
            # Lists of a loop are variants; integers and truth values have no gradients.
            is_number = tensor.dtype.is_floating or tensor.dtype.is_complex
            if (is_number or tensor.dtype == tf.variant) and tensor.op.name not in seen:
                seen.add(tensor.op.name)
                left.extend(tensor.op.inputs if graphs.has_gradient(tensor.op) else ())
    return found


def _crossings(traced: TracedCall, partitions: Mapping[str, int | None]) -> list[Crossing]:
    tensors: dict[str, Any] = {}  # in the order of messages, equal in all processes
    consumers: dict[str, set[int]] = {}
    for op in traced.operations:
        here = partitions[op.name]
        for part in op.inputs:
            source = partitions[part.op.name]
            if EVERYWHERE in (source, here) or source == here:  # each stage has its own copy
                continue
            assert source is not None and here is not None
            _check_edge(part, source, op, here)
            tensors[part.name] = part
            consumers.setdefault(part.name, set()).add(here)
    found = []
    for name, part in tensors.items():
        source = partitions[part.op.name]
        assert source is not None
        found.append(Crossing(part, source, tuple(sorted(consumers[name]))))
    return found


def _check_edge(part: Any, source: int, op: Any, here: int) -> None:
    if source > here:
        raise ModelError(
            "Data must flow from a partition to later ones. Received: operation "
            f"{op.name!r} of partition {here} needs {part.op.name!r} of partition {source}. "
            "Number the partitions in the order of the call, or move one of the two operations."
        )
    if not (part.dtype.is_floating or part.dtype.is_integer or part.dtype.is_bool):
        raise ModelError(
            "Only tensors of numbers and truth values may lead from one partition to another. "
            f"Received: {part.op.name!r} of dtype {part.dtype.name}, from partition {source} to "
            f"{here}. Keep both ends in one partition."
        )


def _stage(
    traced: TracedCall,
    partitions: Mapping[str, int | None],
    crossings: Sequence[Crossing],
    owners: Sequence[int | None],
    stage: int,
) -> Stage:
    # Edges that order side effects cross no cut: processes share no state.
    for op in traced.operations:
        kept = [e for e in op.control_inputs if partitions[e.name] == partitions[op.name]]
        graphs.keep_control_inputs(op, kept)
    arrivals = tuple(c for c in crossings if stage in c.consumers)
    departures = tuple(c for c in crossings if c.source == stage)
    results = tuple(i for i, owner in enumerate(owners) if owner in (stage, EVERYWHERE))
    effects = [op for op in traced.operations if op in traced.effects]
    tensors = [*(c.tensor for c in departures), *(traced.outputs[i] for i in results)]
    function = traced.function.prune(
        [*traced.inputs, *(c.tensor for c in arrivals)],
        [*tensors, *(op for op in effects if partitions[op.name] == stage)],
        name=f"stage_{stage}",
    )
    graphs.take_gradients(function.graph, traced.function.graph)
    # Behind the tensors come the fetched effects, which are no results.
    return Stage(lambda *args: function(*args)[: len(tensors)], arrivals, departures, results)
