"""Timelines: of a process, as slices; of one call, the times of parent and workers, also as sums.

See `call_report` for how each part is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nanotf.wire import timing

NS = 1e-9  # seconds

_PASS_NAMES = {timing.TRAIN: "epoch", timing.TEST: "evaluation", timing.PREDICT: "prediction"}

# Fields and headings of a worker's row in the table and in the picture.
COLUMNS = (
    ("rebuilding", "rebuild"),
    ("first_steps", "first step"),
    ("input", "input"),
    ("compute", "compute"),
    ("communication", "comm."),
    ("communication_wait", "comm. wait"),
    ("between_steps", "between"),
    ("hooks", "hooks"),
    ("epoch_ends", "epoch ends"),
)


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """Times of one worker, in seconds. The parts add up to `total`.

    A part that was not measured is None, and counts as `compute`. In a `@nano` call that is
    everything except `rebuilding` and communication.

    Args:
        rank: int, the worker's number in the call, from 0.
        rebuilding: float, rebuilding the model, or finding it from an earlier call; loading its
            values; making the datasets.
        first_steps: float, the first step of training and the first of validation, which include
            tracing.
        input: float, waiting for data in other steps.
        compute: float, the rest of other steps.
        communication: float, copying and summing what ranks exchange.
        communication_wait: float, waiting there for other ranks.
        between_steps: float, the rest of the epochs: Keras's Python, making iterators.
        hooks: float, waiting within epochs for callbacks.
        epoch_ends: float, from an epoch's end to the next one's beginning: handing over weights,
            waiting for callbacks.
        total: float, from the call's arrival to its end.
        executions: int, of steps, the first included.
    """

    rank: int
    rebuilding: float
    first_steps: float | None
    input: float | None
    compute: float
    communication: float | None
    communication_wait: float | None
    between_steps: float | None
    hooks: float | None
    epoch_ends: float | None
    total: float
    executions: int | None

    @classmethod
    def of(cls, times: timing.WorkerTimes) -> WorkerReport:
        """Sums up the times of a worker."""
        passes, by_keras = passes_of(times), bool(times.passes)  # a `@nano` call has none
        in_passes = sum(p.ended - p.began for p in outer_passes(times))  # validation counts once
        inside, first = sum(p.inside for p in passes), sum(p.first for p in passes)
        waiting = sum(p.input for p in passes)
        in_calls, waited = sum(p.in_calls for p in passes), sum(p.waited for p in passes)
        hooks = sum(p.hooks for p in passes)
        begin = begin_of_passes(times)
        return cls(
            rank=times.rank,
            rebuilding=NS * (begin - times.began),
            first_steps=NS * first if by_keras else None,
            input=NS * waiting if times.knows_input and by_keras else None,
            compute=NS * (inside - waiting - in_calls),
            communication=NS * (in_calls - waited) if times.knows_calls else None,
            communication_wait=NS * waited if times.knows_calls else None,
            between_steps=NS * (in_passes - inside - first - hooks) if by_keras else None,
            hooks=NS * hooks if by_keras else None,
            epoch_ends=NS * (times.ended - begin - in_passes) if by_keras else None,
            total=NS * (times.ended - times.began),
            executions=sum(p.executions for p in passes) if by_keras else None,
        )


def begin_of_passes(times: timing.WorkerTimes) -> int:
    """Returns the time at which a worker was ready for its first pass."""
    # Between `ready` and the first pass, a worker makes its datasets.
    return times.passes[0].began if times.passes else times.ready


def passes_of(times: timing.WorkerTimes) -> list[timing.Pass]:
    """Returns a worker's passes; a call without any, a `@nano` call, counts as one step."""
    if times.passes:
        return times.passes
    whole = timing.Pass(timing.TRAIN, None, times.ready, times.ended)
    whole.inside = times.ended - times.ready
    whole.in_calls, whole.waited = times.in_calls, times.waited
    return [whole]


def outer_passes(times: timing.WorkerTimes) -> list[timing.Pass]:
    """Returns a worker's passes that are not inside others, as validation is in training."""
    passes = passes_of(times)
    return [p for p in passes if not any(_is_inside(p, q) for q in passes)]


def _is_inside(one: timing.Pass, other: timing.Pass) -> bool:
    return one is not other and other.began <= one.began and one.ended <= other.ended


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a track, in nanoseconds."""

    name: str
    began: int
    ended: int
    # Shown with it, by name; names say the unit.
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    label: str = ""  # tells it from others of its name


@dataclasses.dataclass(frozen=True)
class Track:
    """The timeline of a process."""

    name: str
    slices: list[Slice]  # each comes before those inside it


def slices_of_call(call: timing.CallTimes) -> Iterator[Slice]:
    """Yields the slices of the parent's track; each comes before those inside it."""
    yield Slice("preparing", call.began, call.prepared)
    yield Slice("start-up", call.prepared, call.lent)
    yield Slice("shipping", call.lent, call.sent)
    yield Slice("running", call.sent, call.done)
    for name, began, ended in call.hooks:
        yield Slice(name, began, ended)
    yield Slice("finishing", call.done, call.ended)


def slices_of_worker(times: timing.WorkerTimes) -> Iterator[Slice]:
    """Yields the slices of a worker's track; each comes before those inside it."""
    yield Slice("rebuilding", times.began, begin_of_passes(times))
    for one in passes_of(times):
        name, numbers = "running", {}
        if times.passes:
            name = _PASS_NAMES[one.kind]
            name = name if one.index is None else f"{name} {one.index + 1}"  # as Keras counts
            numbers = {"executions": float(one.executions)}
        numbers |= _numbers(times, one.input, one.in_calls, one.waited)
        yield Slice(name, one.began, one.ended, numbers)
    for begin in range(0, len(times.hooks), timing.HOOK_COLUMNS):
        yield Slice("hook", times.hooks[begin], times.hooks[begin + 1])
    for kind, began, ended, waiting, in_calls, waited, calls in rows_of_steps(times):
        numbers = {"executions": float(calls)} if calls > 1 else {}
        numbers |= _numbers(times, waiting, in_calls, waited)
        yield Slice(f"{timing.KINDS[kind]} step", began, ended, numbers)
        if waiting:
            yield Slice("input", began, began + waiting)
        # Only the sum of the calls is known. Most of them are at the end, see `Report`.
        if in_calls:
            yield Slice("communication", ended - in_calls, ended, {"waited_ms": waited / 1e6})


def _numbers(
    times: timing.WorkerTimes, waiting: int, in_calls: int, waited: int
) -> dict[str, float]:
    """Returns the measured numbers to show with a slice of a worker's track."""
    numbers = {}
    if times.knows_input and times.passes:
        numbers["input_ms"] = waiting / 1e6
    if times.knows_calls:
        numbers["communication_ms"] = in_calls / 1e6
        numbers["communication_wait_ms"] = waited / 1e6
    return numbers


def rows_of_steps(times: timing.WorkerTimes) -> Iterator[tuple[int, ...]]:
    """Yields the rows of `WorkerTimes.steps`."""
    flat, width = times.steps, timing.STEP_COLUMNS
    for begin in range(0, len(flat), width):
        yield tuple(flat[begin : begin + width])
