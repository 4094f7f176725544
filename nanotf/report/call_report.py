"""Report of where the time of a call went: `history.nanotf`, `nanotf.last_report()`.

    print(history.nanotf)                           a table
    history.nanotf.plot("where.png")                a timeline of all processes
    history.nanotf.to_chrome_trace("trace.json")    for https://ui.perfetto.dev, chrome://tracing

Each part is measured as follows:

- Input: from the beginning of a step to the arrival of its data. If several steps are one
  execution: from the last collective of the step before. Includes the time in which TensorFlow
  begins a graph, about 0.1 ms.
- Communication: the collectives of steps, each from call to return. Its waiting part is for ranks
  that have not come as far yet; the rest copies and sums.
- Compute: the rest of the steps. The first step of each kind includes tracing, and counts
  separately.
- Hooks: time within epochs when the workers hand over what callbacks need and wait for them: at
  batches, at the beginning of an epoch, around validation.
- Between steps: the rest of the epochs: Keras's Python, making iterators, metrics at the end.
- Epoch ends: from the end of an epoch to the beginning of the next, when the workers hand over
  their weights and wait for callbacks.

The loop of a `@nano` call is the user's, so only its communication is measured separately. A `fit`
in one process measures only its epochs, see `one_process`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nanotf.report import table
from nanotf.report.timed_report import TimedReport
from nanotf.report.timeline import (
    COLUMNS,
    NS,
    Track,
    WorkerReport,
    begin_of_passes,
    slices_of_call,
    slices_of_worker,
)
from nanotf.wire import timing
from nanotf.wire.parts import Part

if TYPE_CHECKING:
    from nanotf.report.chart import Chart

_COLUMNS_OF_TABLE = (*COLUMNS, ("total", "total"), ("executions", "steps"))


@dataclasses.dataclass(frozen=True)
class Report(TimedReport):
    """Times of one call, in seconds.

    The trace shows the first `timing.STEPS_KEPT` steps of each worker one by one. Within a step,
    waiting for data is shown at the beginning, where it was, and communication at the end, where
    most of it was.

    Args:
        method: str, the called method.
        size: int, number of workers.
        total: float, from the check of the arguments to the result.
        preparing: float, checking and describing model and data, in this process.
        start_up: float, waiting for the pool of workers; about 0 if it was warm.
        shipping: float, copying arrays and weights into shared memory, making and sending the
            call, and the callbacks' `on_train_begin`.
        running: float, from there to the end of the last worker.
        finishing: float, using the results.
        hooks: float, the part of `running` when workers waited for this process to copy their
            weights and run callbacks.
        reading: float, the part of `running` when this process read the user's dataset or
            generator, in parallel with all else; 0 for arrays, which workers read.
        shipped_bytes: int, in shared memory, without the batches that steps read.
        workers: tuple of `WorkerReport`, by rank; empty if workers died after training.
        call, times: the recorded times, see `timing`.
        hint: str, what may be faster; "" if nothing is known.
        tuned: tuple of str, the settings that `fit(tune=...)` has chosen for this call.
        tuned_losses: if these change numbers, two sequences of float: the losses of up to 200 of
            the same steps, the mean of each 20, measured without the settings and with them; else
            empty.
        read_processes: int, the number of readers at the end; 0 if there were none.
        parts: tuple of `Part`, the model's layers, losses and metrics that the workers divided, and
            those that they did not; empty in one process.
    """

    method: str
    size: int
    total: float
    preparing: float
    start_up: float
    shipping: float
    running: float
    finishing: float
    hooks: float
    reading: float
    shipped_bytes: int
    workers: tuple[WorkerReport, ...]
    call: timing.CallTimes = dataclasses.field(repr=False)
    times: tuple[timing.WorkerTimes, ...] = dataclasses.field(repr=False)
    hint: str = ""
    tuned: tuple[str, ...] = ()
    tuned_losses: tuple[Sequence[float], ...] = ()
    read_processes: int = 0
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(
        cls,
        method: str,
        call: timing.CallTimes,
        times: tuple[timing.WorkerTimes, ...],
        size: int,
        parts: tuple[Part, ...] = (),
    ) -> Report:
        """Sums up the times of the parent and `size` workers; `times` is empty if these died."""
        return cls(
            method=method,
            size=size,
            total=NS * (call.ended - call.began),
            preparing=NS * (call.prepared - call.began),
            start_up=NS * (call.lent - call.prepared),
            shipping=NS * (call.sent - call.lent),
            running=NS * (call.done - call.sent),
            finishing=NS * (call.ended - call.done),
            hooks=NS * call.in_hooks,
            reading=NS * sum(r.reading for r in call.readings),
            shipped_bytes=call.shipped,
            workers=tuple(WorkerReport.of(each) for each in times),
            call=call,
            times=times,
            parts=parts,
        )

    @classmethod
    def of_one_process(cls, times: timing.WorkerTimes, hint: str) -> Report:
        """Sums up a `fit` without workers: the only row is for this process."""
        call, begin = timing.CallTimes(times.began), begin_of_passes(times)
        call.prepared = call.lent = call.written = call.sent = begin  # there are no such stages
        call.done = call.ended = times.ended
        times = dataclasses.replace(times, began=begin, ready=begin)
        made = cls.of("fit", call, (times,), 1)
        (row,) = made.workers
        epochs = row.total - (row.epoch_ends or 0.0)
        # No step was timed: Keras's loop counts as `compute` as a whole.
        row = dataclasses.replace(
            row, compute=epochs, first_steps=None, between_steps=None, hooks=None, executions=None
        )
        return dataclasses.replace(made, workers=(row,), hint=hint)

    @property
    def title(self) -> str:
        """The method, and where it ran."""
        return (
            f"{self.method} "
            + ("in one process" if self.size == 1 else f"on {self.size} workers")
            + (f", tuned: {', '.join(self.tuned)}" if self.tuned else "")
            + (f", read by {self.read_processes} processes" if self.read_processes else "")
        )

    @property
    def load_imbalance(self) -> float:
        """Extra compute time of the slowest worker, relative to the mean: 0.1 is 10 %."""
        computes = [worker.compute for worker in self.workers]
        mean = sum(computes) / len(computes) if computes else 0.0  # none if the workers died
        return max(computes) / mean - 1 if mean > 0 else 0.0

    def __str__(self) -> str:
        if self.size == 1:
            return "\n".join(_text_of_one_process(self))
        texts = [_text_of_call(self), _text_of_workers(self), _text_of_parts(self.parts)]
        return "\n\n".join("\n".join(lines) for lines in texts).rstrip()

    def _tracks(self) -> list[Track]:
        here = list(slices_of_call(self.call))
        if self.size == 1:
            for times in self.times:
                here.extend(slices_of_worker(times))
            return [Track("this process", here)]
        workers = (Track(f"worker {t.rank}", list(slices_of_worker(t))) for t in self.times)
        return [Track("this process", here), *workers]

    def _chart(self) -> Chart:
        from nanotf.report import call_chart  # imports NumPy

        imbalance = f"load imbalance {100 * self.load_imbalance:.1f} %" if self.size > 1 else None
        title = f"{self.title}: {self.total:.2f} s"
        return call_chart.of_call(title, imbalance, self.call, self.times, self.workers)


_last: collections.deque[Report | None] = collections.deque([None], maxlen=1)


def remember(report: Report | None) -> None:
    """Sets the report that `last_report` returns."""
    _last.append(report)


def last_report() -> Report | None:
    """Returns the times of the last call with `num_processes` in this process.

    Returns:
        A `Report`; None if there was no such call, or none ended successfully.
    """
    return _last[-1]


# ---------------------------------------------------------------------------------- text
def _text_of_call(report: Report) -> Iterator[str]:
    yield f"{report.title}: {report.total:.2f} s"
    yield from lines_of_losses(report.tuned_losses)
    mib = report.shipped_bytes / 2**20
    rows = [
        ("preparing", report.preparing, "checking model and data, in this process"),
        ("start-up", report.start_up, "of the workers; about 0 where they are warm"),
        ("shipping", report.shipping, f"call, weights and arrays; {mib:.1f} MiB of shared memory"),
        ("running", report.running, "see the workers below"),
        ("finishing", report.finishing, "bringing results home"),
    ]
    for heading, seconds, note in rows:
        yield f"  {heading:<12}{seconds:9.3f} s   {note}"
        if heading == "running":
            yield f"    {'hooks':<10}{report.hooks:9.3f} s   workers wait for weights, callbacks"
            if report.reading:
                yield f"    {'reading':<10}{report.reading:9.3f} s   your data, beside the steps"


def lines_of_losses(losses: Sequence[Sequence[float]]) -> Iterator[str]:
    """Writes the losses of steps without settings of `tune`, and with them."""
    if losses:
        before, after = (" ".join(f"{loss:.4g}" for loss in row) for row in losses)
        yield f"Losses of the same steps: {before}; tuned: {after}."


def _text_of_one_process(report: Report) -> Iterator[str]:
    (times,), (row,) = report.times, report.workers
    yield f"{report.title}: {report.total:.2f} s"
    yield from lines_of_losses(report.tuned_losses)
    epochs = [one for one in times.passes if one.kind == timing.TRAIN]
    if epochs:
        seconds = [NS * (one.ended - one.began) for one in epochs]
        rest = "" if len(epochs) == 1 else f", others {sum(seconds[1:]) / (len(epochs) - 1):.3f} s"
        yield f"  {'epochs':<12}{len(epochs):>9}     the first {seconds[0]:.3f} s{rest}"
        yield f"  {'validation':<12}{_validation(times):>9.3f} s   part of the epochs"
        yield f"  {'epoch ends':<12}{row.epoch_ends or 0:>9.3f} s   your callbacks, Keras"
    yield f"No workers were used. {report.hint}".rstrip()


def _validation(times: timing.WorkerTimes) -> float:
    return NS * sum(one.ended - one.began for one in times.passes if one.kind == timing.TEST)


def _text_of_workers(report: Report) -> Iterator[str]:
    if not report.workers:
        yield "The workers died after training, before they reported their times."
        return
    shown = [
        (field, heading)
        for field, heading in _COLUMNS_OF_TABLE
        if any(getattr(worker, field) is not None for worker in report.workers)
    ]
    rows = [[str(w.rank), *(_cell(getattr(w, f)) for f, _ in shown)] for w in report.workers]
    # Headings of two words take two lines; headings of one word take the second.
    headings = [("", "worker"), *(h.rpartition(" ")[::2] for _, h in shown)]
    yield "Seconds of each worker:"
    yield from table.lines([*zip(*headings, strict=True)], rows)
    missing = [heading for field, heading in _COLUMNS_OF_TABLE if field not in dict(shown)]
    if missing:
        yield f"Not measured here: {', '.join(missing)}."
    if report.size > 1 and report.load_imbalance > 0:
        slowest = max(report.workers, key=lambda worker: worker.compute)
        yield (
            f"Load imbalance: {100 * report.load_imbalance:.1f} % (worker {slowest.rank} computes "
            "longest)."
        )


def _text_of_parts(parts: Sequence[Part]) -> Iterator[str]:
    total = sum(part.operations or 0.0 for part in parts)
    for is_divided, heading in ((True, "Divided:"), (False, "Undivided, on all rows:")):
        chosen = [part for part in parts if part.is_divided == is_divided]
        if chosen:
            yield heading
        for part in chosen:
            share = _share(part.operations, total)
            yield f"  {share:>7}  {part.name}" + (f": {part.why}" if part.why else "")
    if total:
        yield "Percentages: floating-point operations of the forward pass, as far as known."


def _share(operations: float | None, total: float) -> str:
    if operations is None or not total:
        return "-"
    return f"{100 * operations / total:.1f} %"


def _cell(value: float | None) -> str:
    """Formats a number in six characters or less, up to 999999."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    # From these limits on, rounding would add a seventh character.
    digits = 3 - sum(value >= limit for limit in (99.9995, 999.995, 9999.95))
    return f"{value:.{digits}f}"
