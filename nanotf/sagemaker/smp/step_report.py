"""`smp.last_report()`: where the time of a step went in each process, and its memory.

report = smp.last_report()       on all ranks
print(report)                    a table
report.plot("pipeline.png")      a row for each process, its passes numbered by microbatch
"""

from __future__ import annotations

import collections
import dataclasses
import textwrap
from collections.abc import Iterator

from nanotf.errors import JobError
from nanotf.report import table
from nanotf.report.call_chart import COLOURS
from nanotf.report.chart import Chart, ProcessRow
from nanotf.report.timed_report import TimedReport
from nanotf.report.timeline import Slice, Track
from nanotf.sagemaker.smp import communication, runtime, times
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.times import ComputedHalf, Execution, Interval

_MIB = 2**20
_WIDTH = 100  # of lines of text
_NO_BREAK = "\xa0"  # in a pass, where `textwrap` must not break the line
_COLOURS = {
    "forward": COLOURS["compute"],
    "backward": COLOURS["input"],
    "waiting": "#E4E4E4",
    "messages, other": "#8C8C8C",
    "weights": COLOURS["epoch ends"],
    "other variables": COLOURS["rebuild"],
    "rest of the peak": "#B9D3E8",
}


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
            Slice("messages, other", *execution.whole),  # first: the others are drawn over it
            *(Slice("waiting", *wait) for wait in execution.waits),
            *(
                Slice(block.kind.name.lower(), *block.time, label=str(block.microbatch))
                for block in execution.blocks
            ),
        ]


@dataclasses.dataclass(frozen=True)
class StepReport(TimedReport):
    """A step of all processes.

    Any rank may draw the picture or write the trace. On several, pass different paths, or test
    `smp.rank() == 0`.

    Args:
        partitions, microbatches: int, their numbers, as in `smp.init`.
        pipeline: str, "interleaved", "simple" or "_only_forward".
        ranks: tuple of `RankReport`, by rank.
    """

    partitions: int
    microbatches: int
    pipeline: str
    ranks: tuple[RankReport, ...]

    @property
    def whole(self) -> Interval:
        """From when the first process began the step to when the last one ended it."""
        wholes = [execution.whole for execution in self._executions()] or [Interval(0, 0)]
        return Interval(min(w.began for w in wholes), max(w.ended for w in wholes))

    @property
    def seconds(self) -> float:
        """Length of the step; 0 with one partition."""
        return self.whole.length / 1e9

    @property
    def title(self) -> str:
        """The step and its length."""
        microbatches = _counted(self.microbatches, "microbatch", "microbatches")
        text = f"{_counted(self.partitions, 'partition', 'partitions')}, {microbatches}"
        numbers = [execution.number for execution in self._executions()]
        if not numbers:
            return text
        return f'Step {numbers[0]} in {text}, "{self.pipeline}": {1e3 * self.seconds:.2f} ms'

    def __str__(self) -> str:
        lines = [self.title, *_table(self)]
        if self.seconds:
            lines += ["", "Begin and end of forward (F) and backward (B) passes, ms:"]
            lines += [line for each in self.ranks for line in _passes(each, self.whole.began)]
        return "\n".join(lines)

    def _tracks(self) -> list[Track]:
        return [
            Track(f"rank {each.rank}, partition {each.partition}", each.slices())
            for each in self.ranks
            if each.execution is not None
        ]

    def _chart(self) -> Chart:
        return Chart(
            self.title,
            [
                ProcessRow(
                    f"rank {each.rank}\npartition {each.partition}",
                    _sums(each),
                    slices=each.slices(),
                )
                for each in self.ranks
            ],
            whole=self.whole,
            time_unit=1e6,
            time_label="milliseconds",
            sums_label="MiB, peak of the process",
            colours=_COLOURS,
        )

    def _executions(self) -> list[Execution]:
        return [each.execution for each in self.ranks if each.execution is not None]


# Of the last `fit` that has started the ranks.
_of_workers: collections.deque[StepReport | None] = collections.deque([None], maxlen=1)


def remember(report: StepReport | None) -> None:
    """Sets the report that `last_report` returns in a process that is no rank."""
    _of_workers.append(report)


def last_report() -> StepReport:
    """Returns the times and the memory of the last step. All ranks call it, and all get it.

    Of the steps that ran last, one with gradients is preferred to one without, such as that of an
    evaluation. With one partition, the report has no times. In a script whose `fit` has started the
    ranks, it is that of the last `fit`, which also returns it, as `history.nanotf`.

    Returns:
        A `StepReport`.

    Raises:
        JobError: No step ran since `smp.init`.
        CollectiveError, WorkerDied: As `smp.allgather`.
    """
    of_workers = _of_workers[-1]
    if of_workers is not None and not runtime.is_rank():
        return of_workers
    config, place = runtime.current(), runtime.place()
    recorded = times.last(config)
    # One partition records no times.
    models = list(runtime.called if recorded is None else recorded.models)
    if not models or (recorded is None and config.partitions > 1):
        raise JobError(
            "A report describes a step that has run. Received: smp.last_report() before a step "
            "with a model. Call it after training."
        )
    from nanotf.sagemaker.smp import memory  # imports TensorFlow

    peak = memory.peak_bytes()  # before this function adds to it
    held = [weight for model in models for weight in model.weights]
    weights, others = memory.variable_bytes(held)
    own = RankReport(
        rank=place.rank,
        partition=place.mp_rank,
        copy=place.dp_rank,
        execution=None if recorded is None else recorded.last(),
        weight_bytes=weights,
        other_variable_bytes=others,
        peak_bytes=peak,
    )
    ranks = tuple(communication.allgather(own))
    return StepReport(config.partitions, config.microbatches, config.pipeline, ranks)


# ---------------------------------------------------------------------------------- text
def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _table(report: StepReport) -> Iterator[str]:
    """Yields a line for each process, under headings of three lines."""
    of_time = [
        [f"{1e3 * seconds:.2f}" for seconds in _times(each)] if each.execution else ["-"] * 4
        for each in report.ranks
    ]
    rows = [
        [
            *(str(number) for number in (each.rank, each.copy, each.partition)),
            *texts,
            *(f"{number / _MIB:.1f}" for number in _memory(each)),
        ]
        for each, texts in zip(report.ranks, of_time, strict=True)
    ]
    headings = [
        ["", "", "", "forward", "backward", "waiting", "other", "weights", "other", "peak"],
        ["", "", "", "", "", "", "", "", "variables", "memory"],
        ["rank", "copy", "partition", *["ms"] * 4, *["MiB"] * 3],
    ]
    yield from table.lines(headings, rows)


def _times(each: RankReport) -> tuple[float, ...]:
    return each.seconds(Half.FORWARD), each.seconds(Half.BACKWARD), each.waiting, each.other


def _memory(each: RankReport) -> tuple[int, ...]:
    return each.weight_bytes, each.other_variable_bytes, each.peak_bytes


def _sums(each: RankReport) -> dict[str, float]:
    """Returns a process's memory, for the picture."""
    weights, others, peak = (number / _MIB for number in _memory(each))
    rest = max(0.0, peak - weights - others)
    return {"weights": weights, "other variables": others, "rest of the peak": rest}


def _passes(each: RankReport, origin: int) -> list[str]:
    """Returns the lines that name a process's passes."""
    texts = [
        f"{block.kind.value}{block.microbatch}{_NO_BREAK}"
        f"{(block.time.began - origin) / 1e6:.2f}-{(block.time.ended - origin) / 1e6:.2f}"
        for block in each.blocks
    ]
    head = f"rank {each.rank}  "
    rest = " " * len(head)
    lines = textwrap.wrap("  ".join(texts), _WIDTH, initial_indent=head, subsequent_indent=rest)
    return [line.replace(_NO_BREAK, " ") for line in lines]
