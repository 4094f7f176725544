"""The result of `optimize`: what was tried, in a table, and the programs that may be used."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanotf.errors import InvalidArgumentError, UnavailableError
from nanotf.inference.engines.inference_engine import F32
from nanotf.inference.optimize_arguments import SearchOptions
from nanotf.inference.program import Program, load
from nanotf.report import table

# What became of a candidate.
PASSED = "ok"
DIFFERS = "differs"  # its outputs are not those of Keras
WORSE = "worse"  # its metric is
FAILED = "failed"  # the engine cannot convert, load or compute the model
CRASHED = "crashed"  # its process died
SLOW = "too slow"  # it took longer than `seconds`
MISSING = "not installed"  # a package is

# Times that differ by less are a tie: noise of a machine is as large.
TIE = 1.05


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An engine with a precision, and what was found about it.

    Attributes:
        engine, precision: str.
        status: str, "ok", "differs", "worse", "failed", "crashed", "too slow" or "not installed".
        reason: str, why it is not "ok", in a line.
        milliseconds: dict of a batch size to the median time of a call; empty if not measured.
        max_difference: float or None, the largest difference from Keras's outputs.
        relative_difference: float or None, the same relative to the largest number of that output.
        convert_seconds, load_seconds: float or None.
        megabytes: float or None, of its files.
        metric: float or None, of its outputs.
        error: the exception with which it ended, or None.
    """

    engine: str
    precision: str
    status: str
    reason: str = ""
    milliseconds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    max_difference: float | None = None
    relative_difference: float | None = None
    convert_seconds: float | None = None
    load_seconds: float | None = None
    megabytes: float | None = None
    metric: float | None = None
    error: BaseException | None = dataclasses.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The engine and the precision, such as "openvino f32"."""
        return f"{self.engine} {self.precision}"

    def rows_per_second(self) -> float:
        """Returns the rows that one process computes, at the best of the batch sizes."""
        return max(1000 * size / time for size, time in self.milliseconds.items())


class OptimizeResult:
    """The candidates that `optimize` has tried. Its text is a table.

    Args:
        candidates: in the order of simplicity: of equally fast ones, the first is the best.
        folder: has a program's folder for each, named as `folder_of` says. It is deleted with this
            object and the programs that it has returned.
        options: of the search.
        metric: of Keras's own outputs, or None.

    Attributes:
        candidates: tuple of `Candidate`.
        metric: float or None.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        folder: tempfile.TemporaryDirectory[str],
        options: SearchOptions,
        metric: float | None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.metric = metric
        self._folder, self._options = folder, options
        self._batch_sizes = tuple(options.batch_sizes)

    def best_candidate(
        self,
        batch_size: int | None = None,
        max_difference: float | None = None,
        metric_loss: float | None = None,
        engine: str | None = None,
        precision: str | None = None,
    ) -> Candidate:
        """Returns the fastest of the candidates that are "ok".

        Of those that take up to 5 % longer than the fastest, it is the simplest: in float32 before
        others, TensorFlow's engines before others.

        Args:
            batch_size: one of those that were measured; None for all, by their geometric mean.
            max_difference: limit for the difference relative to the largest output, or None.
            metric_loss: limit for what the metric is worse, relative to Keras's own, or None.
            engine, precision: str or None for any, "tensorflow" and "f32" for example.

        Raises:
            InvalidArgumentError: The batch size was not measured, or there was no metric.
            UnavailableError: No candidate fits; names what became of each.
        """
        if batch_size is not None and batch_size not in self._batch_sizes:
            raise InvalidArgumentError(
                f"`batch_size` must be one of those measured: {self._batch_sizes}. Received: "
                f"batch_size={batch_size!r}. Pass it to `optimize` in `batch_sizes`."
            )
        if metric_loss is not None and self.metric is None:
            raise InvalidArgumentError(
                f"`metric_loss` needs a metric. Received: metric_loss={metric_loss!r} of a search "
                "without one. Pass `metric` and `y` to `optimize`."
            )
        sizes = self._batch_sizes if batch_size is None else (batch_size,)
        fitting = [
            each
            for each in self.candidates
            if each.status == PASSED
            and engine in (None, each.engine)
            and precision in (None, each.precision)
            # With a metric, those in a lower precision passed however much they differ.
            and (max_difference is None or (each.relative_difference or 0.0) <= max_difference)
            and (metric_loss is None or self._loss(each) <= metric_loss)
        ]
        if not fitting:
            ends = "; ".join(f"{each.name}: {_described(each)}" for each in self.candidates)
            raise UnavailableError(
                "The best is one of the candidates that are ok and within the limits. Received: "
                f"{ends}. Change the limits, the engines or the model."
            )
        costs = [
            # Geometric: the largest batch, which takes the longest, would decide a sum alone.
            math.prod(each.milliseconds[size] for size in sizes) ** (1 / len(sizes))
            for each in fitting
        ]
        least = min(costs)
        return next(each for each, cost in zip(fitting, costs, strict=True) if cost <= TIE * least)

    def best(
        self,
        batch_size: int | None = None,
        max_difference: float | None = None,
        metric_loss: float | None = None,
        engine: str | None = None,
        precision: str | None = None,
    ) -> Program:
        """Returns the program of `best_candidate`, loaded in this process.

        Args:
            batch_size, max_difference, metric_loss, engine, precision: as in `best_candidate`.

        Raises:
            InvalidArgumentError, UnavailableError: As `best_candidate`.
        """
        found = self.best_candidate(batch_size, max_difference, metric_loss, engine, precision)
        return self.program(found.engine, found.precision)

    def program(self, engine: str, precision: str = F32) -> Program:
        """Returns the program of a candidate that is "ok", loaded in this process.

        Args:
            engine, precision: the candidate's.

        Raises:
            InvalidArgumentError: It was not tried, or is not "ok".
        """
        by_name = {(each.engine, each.precision): each for each in self.candidates}
        found = by_name.get((engine, precision))
        if found is None or found.status != PASSED:
            passed = [each.name for each in self.candidates if each.status == PASSED]
            became = "was not tried" if found is None else f"is {_described(found)}"
            raise InvalidArgumentError(
                f"A program is one of the candidates that are ok: {', '.join(passed) or 'none'}. "
                f"Received: {engine} {precision}, which {became}."
            )
        folder = folder_of(pathlib.Path(self._folder.name), engine, precision)
        # As many threads as were measured.
        made = load(folder, threads=self._options.threads)
        weakref.finalize(made, _let_go, self._folder)  # which keeps the folder until then
        return made

    def save(
        self,
        path: str | pathlib.Path,
        batch_size: int | None = None,
        max_difference: float | None = None,
        metric_loss: float | None = None,
        engine: str | None = None,
        precision: str | None = None,
    ) -> None:
        """Writes the folder of the best program, see `best` and `Program.save`.

        Raises:
            InvalidArgumentError, UnavailableError: As `best_candidate` and `Program.save`.
            OSError: The disk is full or not writable.
        """
        self.best(batch_size, max_difference, metric_loss, engine, precision).save(path)

    def _loss(self, candidate: Candidate) -> float:
        assert self.metric is not None and candidate.metric is not None
        return loss_of(candidate.metric, self.metric, self._options.higher_is_better)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} of {len(self.candidates)} candidates>\n{self}"

    def _lines(self) -> Iterator[str]:
        has_metric = self.metric is not None
        times = [f"ms at {size}" for size in self._batch_sizes]
        last = [*(["metric"] if has_metric else []), "load s", "MB", "status"]
        headings = ["engine", "precision", *times, "rows/s", "difference", "relative", *last]
        rows = [self._cells(each, has_metric) for each in self.candidates]
        yield from table.lines([headings], rows)
        if has_metric:
            yield f"Keras's own metric: {_number(self.metric)}"
        for each in self.candidates:
            if each.reason:
                yield f"{each.name}: {_described(each)}"
        # `best_candidate` raises if there is none, and a table must print.
        if any(each.status == PASSED for each in self.candidates):
            sizes = ", ".join(map(str, self._batch_sizes))
            yield f"best for batches of {sizes}: {self.best_candidate().name}"

    def _cells(self, each: Candidate, has_metric: bool) -> list[str]:
        times = [_number(each.milliseconds.get(size)) for size in self._batch_sizes]
        rate = f"{each.rows_per_second():.0f}" if each.milliseconds else "-"
        gaps = [_number(each.max_difference, "g"), _number(each.relative_difference, "g")]
        metric = [_number(each.metric)] if has_metric else []
        sizes = [_number(each.load_seconds), _number(each.megabytes)]
        return [each.engine, each.precision, *times, rate, *gaps, *metric, *sizes, each.status]


def loss_of(metric: float, expected: float, higher_is_better: bool) -> float:
    """Returns how much worse a metric is, relative to the expected one: negative if it is better.

    Not a number is infinitely worse.
    """
    lost = expected - metric if higher_is_better else metric - expected
    if math.isnan(lost):  # as a NaN, it would be above no limit
        return math.inf
    return lost / abs(expected) if expected else math.copysign(math.inf, lost) if lost else 0.0


def folder_of(folder: pathlib.Path, engine: str, precision: str) -> pathlib.Path:
    """Returns a candidate's folder."""
    return folder / f"{engine}-{precision}"


def _described(candidate: Candidate) -> str:
    return f"{candidate.status}{candidate.reason and ': '}{candidate.reason}"


def _number(value: float | None, kind: str = "") -> str:
    """Returns a number with three digits."""
    if value is None:
        return "-"
    if kind or not 0.01 <= abs(value) < 1000:
        return f"{value:.1e}" if kind and value else f"{value:.3g}"
    return f"{value:.3g}"


def _let_go(_: Any) -> None:
    """Does nothing: that it is called later is what keeps its argument."""
