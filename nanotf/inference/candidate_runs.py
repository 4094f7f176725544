"""Converts a model to an engine, and measures it: each in a process of its own, for `optimize`.

A converter or an engine may abort its process, and never come to an end. So `optimize` runs these
functions as items of `nanotf.imap`, in a new process each, and learns from the error how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.inference import program_folder
from nanotf.inference.engines import engine_table
from nanotf.inference.engines.inference_engine import INT8, InferenceEngine
from nanotf.inference.exported import Exported
from nanotf.inference.program import Program, load, make
from nanotf.inference.signature import DEFAULT

TIME_LIMIT = signal.SIGALRM  # ends a process that takes too long

Arrays = Mapping[str, np.ndarray[Any, Any]]

_TEMPORARY, _VARIABLE = "temporary", "TMPDIR"  # which converters in C++ read

_WARM_UP = 2  # calls that are not measured: engines compile or allocate in the first ones
_CALLS = (5, 200)  # the least and the largest number of measured calls
_SECONDS = 0.5  # after the least number of calls, no more than this long


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion to try."""

    engine: InferenceEngine  # the object: an engine that the user has added is not in the worker
    precision: str
    model: Exported
    folder: pathlib.Path  # for the program
    threads: int
    seconds: float  # after which the process ends itself


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A converted program to compare and measure."""

    engine: InferenceEngine
    precision: str
    folder: pathlib.Path
    threads: int
    batch_sizes: tuple[int, ...]
    seconds: float
    returns_outputs: bool  # whether a metric needs them


@dataclasses.dataclass(frozen=True)
class MeasuredProgram:
    """The findings about a program."""

    load_seconds: float
    milliseconds: dict[int, float]  # median of a call, by batch size
    max_difference: float  # from the expected outputs
    relative_difference: float  # the same, relative to the largest number of that output
    outputs: Arrays | None  # of all rows, by name


def convert(conversion: Conversion, rows: Arrays) -> float:
    """Writes the program; returns the seconds that it took.

    Args:
        rows: by the names of the inputs. int8 is calibrated with them.

    Raises:
        ConversionError: The engine cannot convert this model, or load what it has made of it.
    """
    # What the limit kills may leave files: they then lie in the search's folder.
    with _limited(conversion.seconds), _temporary_files_in(conversion.folder.parent):
        _add_engine(conversion.engine)
        began = time.perf_counter()
        # By name, as `make` takes the rows of a SavedModel. Other precisions need none.
        samples = dict(rows) if conversion.precision == INT8 else None
        make(
            conversion.model.folder,
            conversion.engine.name,
            conversion.precision,
            conversion.threads,
            samples,
            conversion.folder,
        )
        # `make` saw only a SavedModel, whose names are sorted and whose structures are unknown.
        _describe(conversion.folder, conversion.model)
        return time.perf_counter() - began


def measure(
    measurement: Measurement, rows: Arrays, expected: Arrays, of_batches: Mapping[int, Arrays]
) -> MeasuredProgram:
    """Loads a program, compares its outputs and measures its calls.

    Args:
        rows: by the names of the inputs.
        expected: by the names of the outputs, for all rows, in batches of the largest size.
        of_batches: by batch size, the same for one batch of the first rows. Rows may depend on the
            other rows of their batch.

    Raises:
        ConversionError: The engine cannot load its files.
    """
    with _limited(measurement.seconds):
        _add_engine(measurement.engine)
        began = time.perf_counter()
        program = load(measurement.folder, threads=measurement.threads)
        load_seconds = time.perf_counter() - began
        outputs = _outputs(program, rows, max(measurement.batch_sizes))
        found = [difference(outputs, expected)]  # of all rows, then of each batch size
        milliseconds = {}
        for size in measurement.batch_sizes:
            batch = some_rows(rows, range(size))
            # An engine may go wrong at one size alone; this call also compiles for the size.
            found.append(difference(program.run(batch), of_batches[size]))
            milliseconds[size] = 1000 * _seconds_of_a_call(program, batch)
    worst = [max(each) for each in zip(*found, strict=True)]
    kept = outputs if measurement.returns_outputs else None
    return MeasuredProgram(load_seconds, milliseconds, worst[0], worst[1], kept)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends this process by `TIME_LIMIT` if code in this context takes longer.

    Code of an engine may hold the GIL, or block: only the kernel can end it.
    """
    signal.signal(TIME_LIMIT, signal.SIG_DFL)  # a handler of Python's would wait for the GIL
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the worker has yet to send the result


@contextlib.contextmanager
def _temporary_files_in(folder: pathlib.Path) -> Iterator[None]:
    """Makes code in this context put its temporary files below a folder.

    A process that is killed leaves them, and the folder is deleted in the end.
    """
    temporary = folder / _TEMPORARY
    temporary.mkdir(exist_ok=True)  # candidates before have made it
    before = tempfile.tempdir, os.environ.get(_VARIABLE)
    # Both: Python may have read the variable already, and code in C++ knows no `tempfile`.
    tempfile.tempdir = os.environ[_VARIABLE] = str(temporary)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        if before[1] is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before[1]


def _add_engine(engine: InferenceEngine) -> None:
    engine_table.ENGINES.setdefault(engine.name, engine)


def _describe(folder: pathlib.Path, model: Exported) -> None:
    """Adds to a program of a SavedModel what the Keras model behind it takes and returns."""
    found = program_folder.read_description(folder)
    signatures = {name: model.signatures[name] for name in found.signatures}
    complete = dataclasses.replace(
        found, signatures=signatures, inputs=model.inputs, outputs=model.outputs
    )
    program_folder.write_description(folder, complete)


# ------------------------------------------------------------------------------------------ rows
def some_rows(arrays: Arrays, places: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns copies of some rows; after the last row comes the first."""
    return {name: np.take(array, places, 0, mode="wrap") for name, array in arrays.items()}


def number_of_rows(arrays: Arrays) -> int:
    """Returns the number of rows of arrays that all have as many."""
    return len(next(iter(arrays.values())))


def _outputs(program: Program, rows: Arrays, size: int) -> dict[str, np.ndarray[Any, Any]]:
    count = number_of_rows(rows)
    found = [
        program.run(some_rows(rows, range(begin, min(begin + size, count))))
        for begin in range(0, count, size)
    ]
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def difference(found: Arrays, expected: Arrays) -> tuple[float, float]:
    """Returns the largest difference, and the largest relative to its output's largest number.

    Both are infinite where a shape, a name, a text or the place of a NaN differs.
    """
    if set(found) != set(expected):
        return np.inf, np.inf
    pairs = [_difference(found[name], expected[name]) for name in expected]
    largest, relative = (max(each) for each in zip(*pairs, strict=True))
    return largest, relative


def _difference(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> tuple[float, float]:
    if found.shape != expected.shape:
        return np.inf, np.inf
    if expected.dtype.kind in "OSU":
        return (0.0, 0.0) if np.array_equal(found, expected) else (np.inf, np.inf)
    # In their own types, differences of unsigned integers wrap, those of float16 overflow.
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    one, other = found.astype(kind), expected.astype(kind)
    # Equal infinities are no difference, though their gap is a NaN.
    unlike = (one != other) & ~(np.isnan(one) & np.isnan(other))
    if not unlike.any():
        return 0.0, 0.0
    gaps = np.abs(one[unlike] - other[unlike])
    largest = float(gaps.max()) if np.isfinite(gaps).all() else np.inf
    # An infinite output would make every difference of the others zero.
    finite = np.abs(other[np.isfinite(other)])
    size = float(finite.max()) if finite.size else 0.0
    return largest, largest / size if size else np.inf


# ----------------------------------------------------------------------------------------- times
def _seconds_of_a_call(program: Program, batch: Arrays) -> float:
    """Returns the median, which a neighbor on the machine disturbs less than the mean."""
    for _ in range(_WARM_UP):
        program.run(batch, DEFAULT)
    times: list[float] = []
    least, most = _CALLS
    end = time.perf_counter() + _SECONDS  # the first calls, which compile, take none of it
    while len(times) < least or (len(times) < most and time.perf_counter() < end):
        began = time.perf_counter()
        program.run(batch, DEFAULT)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
