"""Times of a step in one partition: when it computed, sent and waited.

The operations of a partition form one line (`exchange.Line`). Those that run Python,
almost all of them messages, note when they began and ended; TensorFlow computed between two of
them. So measuring costs a microsecond per message. Where no message follows a computation, as after
the first partition's gradients, an operation of its own notes the end.

A step's first operation begins it (`advice.SpeedComparison`), which forgets the times of its last
execution.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanotf.sagemaker.smp.config import Config
from nanotf.sagemaker.smp.schedule import Half
from nanotf.wire import timing


@dataclass(frozen=True)
class Label:
    """The purpose of an operation in the line."""

    microbatch: int  # counts from 0
    ends: Half | None = None  # the computation that ended when the operation began; None if none
    waits: bool = False  # for a message


class Interval(NamedTuple):
    """A part of a step.

    Args:
        began, ended: int, nanoseconds of a clock that all processes of this host share.
    """

    began: int
    ended: int

    @property
    def length(self) -> int:
        """Nanoseconds."""
        return self.ended - self.began


class ComputedHalf(NamedTuple):
    """The computation of one half of a microbatch.

    Args:
        kind: `Half`, `FORWARD` or `BACKWARD`.
        microbatch: int, counts from 0.
        time: `Interval`, from the operation before the computation to the one after it.
    """

    kind: Half
    microbatch: int
    time: Interval


@dataclass(frozen=True)
class Execution:
    """Times of one execution of a step in this partition.

    Args:
        number: int, 1 for the first execution of the traced step.
        whole: `Interval`, from the begin to the last operation's end.
        blocks: tuple of `ComputedHalf`, in order.
        waits: tuple of `Interval`, for messages.
    """

    number: int
    whole: Interval
    blocks: tuple[ComputedHalf, ...]
    waits: tuple[Interval, ...]

    @property
    def computed(self) -> int:
        """Nanoseconds in which the partition computed."""
        return sum(block.time.length for block in self.blocks)


class StepTimes:
    """Times of a traced step; keeps those of its last execution.

    Args:
        config: the one for which the step is traced.

    Attributes:
        models: those that the step calls.
        executions: the number of those begun so far.
        computes_gradients: known once the step is traced.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()  # `_last` would keep them for good
        self.executions = 0
        self.computes_gradients = False
        self._began = 0  # nanoseconds of `timing.now`
        self._events: list[tuple[Label, Interval]] = []  # in order, as only one runs at a time

    def noting(self, label: Label, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function of the line note its times. Called when the step is traced."""
        self.computes_gradients = self.computes_gradients or label.ends is Half.BACKWARD

        @functools.wraps(function)
        def noted(*args: Any) -> Any:
            began = timing.now()
            result = function(*args)
            self._events.append((label, Interval(began, timing.now())))
            return result

        return noted

    def begins(self) -> None:
        """Begins an execution."""
        self.executions += 1
        self._events = []
        _last[self.computes_gradients] = self
        self._began = timing.now()

    def last(self) -> Execution:
        """Returns the times of the last execution, once it has ended."""
        before, blocks, waits = self._began, [], []
        for label, interval in self._events:
            if label.ends is not None:
                block = ComputedHalf(label.ends, label.microbatch, Interval(before, interval.began))
                blocks.append(block)
            if label.waits:
                waits.append(interval)
            before = interval.ended
        whole = Interval(self._began, before)
        return Execution(self.executions, whole, tuple(blocks), tuple(waits))


_last: dict[bool, StepTimes] = {}  # by `computes_gradients`: the step that ran last


def last(config: Config) -> StepTimes | None:
    """Returns the times of the step that ran last.

    Args:
        config: the one for which the step must have been traced.

    Returns:
        Those of a step with gradients, if one ran; None if no step ran.
    """
    for computes_gradients in (True, False):
        found = _last.get(computes_gradients)
        # A later `init` makes another configuration, even an equal one.
        if found is not None and found.config is config:
            return found
    return None
