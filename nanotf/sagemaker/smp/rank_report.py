"""A row of a `StepReport`: one process."""

from __future__ import annotations

import dataclasses

from nanotf.report.timeline import Slice
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.times import ComputedHalf, Execution


@dataclasses.dataclass(frozen=True)
class RankReport:
    """One process.

    Args:
        rank: int, 0 to `smp.size() - 1`.
        partition: int, the part of the model that it holds.
        copy: int, the copy of the model to which it belongs.
        execution: `Execution`, times of the step, nanoseconds; None with one partition.
        weight_bytes: int, of the values of this process's weights.
        other_variable_bytes: int, of its other variables: the optimizer's slots, counters, metrics.
        peak_bytes: int, the largest resident memory of the process so far (VmHWM).
    """

    rank: int
    partition: int
    copy: int
    execution: Execution | None
    weight_bytes: int
    other_variable_bytes: int
    peak_bytes: int

    @property
    def blocks(self) -> tuple[ComputedHalf, ...]:
        """The forward and backward computations of the microbatches, in order."""
        return () if self.execution is None else self.execution.blocks

    def seconds(self, kind: Half) -> float:
        """Returns the time for which it computed, forward or backward."""
        return sum(block.time.length for block in self.blocks if block.kind is kind) / 1e9

    @property
    def waiting(self) -> float:
        """Seconds of waiting for messages of other partitions."""
        execution = self.execution
        return 0.0 if execution is None else sum(wait.length for wait in execution.waits) / 1e9

    @property
    def other(self) -> float:
        """Seconds of sending, and of TensorFlow between operations."""
        if self.execution is None:
            return 0.0
        return (self.execution.whole.length - self.execution.computed) / 1e9 - self.waiting

    def slices(self) -> list[Slice]:
        """Returns its timeline: the step, the waits in it, and the passes by microbatch."""
        execution = self.execution
        if execution is None:
            return []
        return [
            Slice("messages, other", *execution.whole),
            *(Slice("waiting", *wait) for wait in execution.waits),
            *(
                Slice(block.kind.name.lower(), *block.time, label=str(block.microbatch))
                for block in execution.blocks
            ),
        ]
