"""Checks of the arguments of `optimize`, before anything starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    check_choice,
    check_integer,
)
from nanotf.inference.engines import engine_table
from nanotf.inference.engines.inference_engine import BF16, F32, INT8
from nanotf.parent.map import item_arguments

AUTO = "auto"
PRECISIONS = (F32, BF16, INT8)  # the order of candidates: of equally fast ones, the first wins

BATCH_SIZES = (1, 32)  # a request of one row; Keras's default `batch_size`
TOLERANCE = 1e-3  # relative; engines fuse and reorder float32 sums
SECONDS = 120.0  # for a conversion, and again for a measurement
METRIC_LOSS = 0.01  # relative to the metric of Keras's outputs


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """The arguments of `optimize` that say how candidates are judged and measured; see there.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: One of them cannot be used.
    """

    tolerance: float = TOLERANCE
    threads: int = 1
    batch_sizes: Sequence[int] = BATCH_SIZES
    metric: Callable[[Any, Any], Any] | None = None
    y: Any = None
    metric_loss: float = METRIC_LOSS
    higher_is_better: bool = True
    seconds: float = SECONDS
    verbose: Any = AUTO

    def __post_init__(self) -> None:
        check_integer("threads", self.threads, "Pass the number of cores of a process")
        _check_number("tolerance", self.tolerance, lambda v: 0 <= v < math.inf, "of at least 0")
        # Infinity is allowed: `nano_names` passes it. NaN fails each of these comparisons.
        _check_number("metric_loss", self.metric_loss, lambda v: v >= 0, "of at least 0")
        _check_number("seconds", self.seconds, lambda v: 0 < v < math.inf, "above 0")
        _check_metric(self.metric, self.y)
        item_arguments.check_verbose(self.verbose)
        object.__setattr__(self, "batch_sizes", _check_sizes(self.batch_sizes))


def candidates(engines: Any, precisions: Any) -> list[tuple[str, str]]:
    """Returns pairs of engine and precision, simple ones first."""
    # Read at the call: users may have added engines.
    known = tuple(engine_table.ENGINES)
    chosen = known if isinstance(engines, str) and engines == AUTO else _names("engines", engines)
    for name in chosen:
        check_choice("engines", name, known)
    for name in _names("precisions", precisions):
        check_choice("precisions", name, PRECISIONS)
    found = [
        (name, precision)
        for precision in PRECISIONS
        if precision in precisions
        for name in known  # in the table's order, whatever the order of the argument
        if name in chosen and precision in engine_table.ENGINES[name].precisions
    ]
    if not found:
        raise InvalidArgumentError(
            "At least one of the engines must have one of the precisions. Received: "
            f"engines={engines!r}, precisions={precisions!r}. Add an engine, or 'f32'."
        )
    return found


def _names(argument: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgumentTypeError(
            f"`{argument}` must be a sequence of names. Received: {argument}={value!r}. Pass a "
            f"tuple, such as ({value!r},)."
        )
    return tuple(value)


def check_int8(precisions: Iterable[str], metric: Any) -> None:
    """Rejects int8 without a metric."""
    if INT8 in precisions and metric is None:
        raise InvalidArgumentError(
            "int8 changes results, often by much, so its worth is measured. Received: "
            "precisions with 'int8', and no metric. Pass `metric` and `y`."
        )


def _check_sizes(batch_sizes: Any) -> tuple[int, ...]:
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Iterable):
        raise InvalidArgumentTypeError(
            "`batch_sizes` must be a sequence of numbers of rows. Received: "
            f"batch_sizes={batch_sizes!r}. Pass a tuple, such as (1, 32)."
        )
    found = [check_integer("batch_sizes", each, "Pass numbers of rows") for each in batch_sizes]
    if not found:
        raise InvalidArgumentError(
            "`batch_sizes` must have an element. Received: none. Pass the numbers of rows that the "
            "model will get at once."
        )
    return tuple(sorted(set(found)))  # a size given twice would be measured twice


def _check_number(name: str, value: Any, fits: Callable[[float], bool], words: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not fits(value):
        raise InvalidArgumentError(
            f"`{name}` must be a number {words}. Received: {name}={value!r}."
        )


def _check_metric(metric: Any, y: Any) -> None:
    if metric is not None and not callable(metric):
        raise InvalidArgumentTypeError(
            "`metric` must be a function of the labels and the outputs. Received: "
            f"{type(metric).__name__}. Pass a function such as sklearn.metrics.accuracy_score."
        )
    if (metric is None) != (y is None):
        raise InvalidArgumentError(
            "`metric` and `y` belong together: metric(y, outputs). Received: "
            f"{'y' if metric is None else 'metric'} alone. Pass both, or none."
        )
